"""The product of the axes: is it legal, and which rank has which coordinates."""
