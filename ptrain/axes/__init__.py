"""Code that all axes share: the form of a rule, and ring traffic."""
