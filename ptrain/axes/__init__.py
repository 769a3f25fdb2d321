"""What all axes share: the form of a rule, and the bytes of a ring."""
