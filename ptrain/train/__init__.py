"""Training: launcher, loop, checkpoints and run folder."""
