"""The plan: the steps that will be applied to the model, as data."""
