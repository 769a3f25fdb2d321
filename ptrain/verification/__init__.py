"""The comparison of a run with one device: what departs, and why."""
