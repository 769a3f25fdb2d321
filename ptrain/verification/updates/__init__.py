"""Diagnosis of update mismatches, by replaying the update."""
