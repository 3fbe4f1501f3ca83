"""Blocks of remote values: in memory, on disk, and shared between processes.

It knows ranges of URLs, but neither stores nor documents.
"""
