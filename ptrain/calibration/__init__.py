"""Calibration: measure a machine's rates while all ranks compute at the same time."""
