"""Matplotlib charts of schedules, memory and token shards (extra `report`)."""
