"""Building blocks for trio: background tasks, single flight, memory budgets, bounded least-recently-used maps.

Knows nothing of bytes, servers or files.
"""
