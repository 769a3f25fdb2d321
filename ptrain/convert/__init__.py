"""What a training leaves: a folder that others load, and texts that its model would write."""
