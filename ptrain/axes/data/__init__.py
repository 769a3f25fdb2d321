"""Data axes: legal placements, costs, and the runtime of flat units."""
