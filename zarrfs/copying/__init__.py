"""A whole Store at once: copied into a directory, checked, compared, or committed as a new source.

Knows Store and Value. Knows neither mounts nor jobs.
"""
