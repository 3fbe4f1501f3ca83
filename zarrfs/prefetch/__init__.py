"""Prediction of the keys that are read next: along a chunk grid, in the order of a directory, or from a recording.

Read-ahead within a value is in cache/streams.py. This package must not know how a store fetches.
"""
