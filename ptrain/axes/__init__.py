"""Code that all axes share: the form of a rule, search spaces, and ring traffic."""
