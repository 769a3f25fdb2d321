"""Training: launcher, training loop, checkpoints and run folder."""
