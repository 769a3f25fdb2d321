"""Tensor axis: legal plans, their all-reduces, and sharded operators."""
