"""Pipeline axis: schedules, their proof and bubble, and stage execution."""
