"""A schedule, slices of the tokens, or a step's memory, as a picture, by matplotlib (the extra `report`)."""
