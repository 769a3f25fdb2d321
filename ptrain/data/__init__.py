"""Data: built-in text, token files, custom datasets, and each rank's samples."""
