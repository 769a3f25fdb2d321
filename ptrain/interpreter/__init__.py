"""The way from a plan to a program: the executor of each step, and the program."""
