"""The update: torch's optimizers by name, and ours."""
