"""Simulation: run the training program in one process on fake ranks and fake tensors."""
