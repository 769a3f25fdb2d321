"""Search: whether a spec fits, changes that fit, the best placement, recomputation budgets."""
