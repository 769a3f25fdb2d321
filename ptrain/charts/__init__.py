"""A schedule, a step's memory, or who has which tokens, as a picture (the extra `report`)."""
