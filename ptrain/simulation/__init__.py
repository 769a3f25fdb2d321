"""Simulation: runs the training program in one process on fake ranks and tensors."""
