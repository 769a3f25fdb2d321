"""The optimizer update: torch's optimizers by name, and Lion and Muon."""
