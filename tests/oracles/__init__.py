"""Closed forms of the cost of the axes, which tests compare with the derivation.

Each is written from what a mode or a schedule means and from its sources, reads neither what
derives nor the orders that run (test_layers.py), and is imported by nothing in ptrain.
"""
