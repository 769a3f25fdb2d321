"""What the user said: a spec's grammar, its reader and writer, and faults with their place."""
