"""What a block, a stage or a loss allocates, recorded by running it once."""
