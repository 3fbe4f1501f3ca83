"""Reference sets (kerchunk versions 0 and 1, JSON and Parquet): parse, render and write them.

This package uses stores and documents. It knows nothing of mounts or of how a source is detected.
"""
