"""What a machine does in a second: how long operators, collectives and wrappers take on it."""
