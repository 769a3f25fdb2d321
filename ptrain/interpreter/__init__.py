"""Execution of a plan: one executor per step, and the program."""
