"""Pipeline axis: schedules, their proof and bubble, and the execution of stages."""
