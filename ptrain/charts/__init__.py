"""A schedule, a step's memory, who has which tokens or where these go, as a picture (the extra `report`)."""
