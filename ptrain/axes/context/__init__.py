"""The context axis: slices of the tokens, and how attention reaches those of other ranks."""
