"""Reference sets (kerchunk versions 0 and 1, JSON and Parquet): parse, render, check, write and merge them.

This package uses stores and documents. It knows nothing of mounts or of how a source is detected.
"""
