"""Data axes: legal placements, their costs, and the runtime of flat units."""
