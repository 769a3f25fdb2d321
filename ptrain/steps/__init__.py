"""The step classes of a plan, and their properties."""
