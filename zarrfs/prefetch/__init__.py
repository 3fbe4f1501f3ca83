"""Prediction of the keys that are read next: along a chunk grid, in the order of a directory, or from a recording.

Calls Store.prefetch() and nothing else of a store. Read-ahead within a value is in cache/streams.py.
"""
