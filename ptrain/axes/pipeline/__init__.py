"""The pipeline axis: schedules, their proof and bubble, and how stages are run."""
