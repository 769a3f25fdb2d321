"""A schedule, a step's memory, or which rank or expert has which tokens, as a picture (extra `report`)."""
