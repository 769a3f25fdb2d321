"""Meters for memory, traffic, waits, replicas and routing. They never import predictions."""
