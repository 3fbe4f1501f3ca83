"""Blocks of remote values: in memory, on disk, and shared between processes.

Knows ranges of URLs. Knows neither stores nor documents.
"""
