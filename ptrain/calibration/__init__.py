"""What a machine takes for the parts of a training, measured on ranks that all compute at once."""
