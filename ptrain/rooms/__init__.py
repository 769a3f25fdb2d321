"""Tensor runtimes (rooms): the interface, the torch runtime of a rank, and the ghost runtime."""
