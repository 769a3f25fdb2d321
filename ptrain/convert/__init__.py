"""A training as a folder that others load."""
