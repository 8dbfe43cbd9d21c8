"""Forwards and backwards on many threads: the map, its parts, and what trades memory for time."""
