"""Private torch APIs, by torch component and version."""
