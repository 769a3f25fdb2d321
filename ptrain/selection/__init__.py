"""Search: fit of a spec, changes that fit, the best placement, recomputation budgets."""
