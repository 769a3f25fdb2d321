"""A schedule, a step's memory, or where tokens go, as a picture (the extra `report`)."""
