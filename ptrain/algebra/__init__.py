"""Legality of a product of axes."""
