"""Prediction of the keys that are read next: along a chunk grid, or in the order of a directory.

Read-ahead within a value is in cache/streams.py. This package must not know how a store fetches.
"""
