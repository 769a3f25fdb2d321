"""A training: its launcher, its loop, its checkpoints and its run folder."""
