"""Comparison of a run with a single-device reference, and diagnosis of differences."""
