"""Model metadata (names, shapes, stages, roles) without torch."""
