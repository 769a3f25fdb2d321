"""Execution of a plan: one executor per kind of step, and the training program."""
