"""The program that trains, played by one process on fake ranks and fake tensors."""
