"""Whether a spec fits its cluster, what would, and what a memory budget recomputes."""
