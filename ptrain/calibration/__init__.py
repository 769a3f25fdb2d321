"""Calibration: measures a machine's rates with all ranks computing at once."""
