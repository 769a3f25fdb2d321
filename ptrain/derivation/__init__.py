"""Prediction of a plan's memory, traffic and time (columns `paper` and `exact`)."""
