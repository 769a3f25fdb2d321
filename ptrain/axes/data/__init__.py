"""The data axes: which tuples are legal, what they cost, and the life of a flat unit."""
