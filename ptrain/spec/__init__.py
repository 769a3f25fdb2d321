"""What the user said: a spec's grammar, its reader and writer, faults, and which rank is where."""
