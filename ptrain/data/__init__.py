"""Training data: the built-in text, token files, custom datasets, and the samples of each rank."""
