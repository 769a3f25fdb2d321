"""The private torch APIs in use, one module per torch component, by torch version."""
