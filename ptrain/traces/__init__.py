"""Allocations of a block, stage or loss, recorded by running it once."""
