"""Reference sets (kerchunk versions 0 and 1, JSON and Parquet): parsed, rendered, checked, written, merged.

Knows stores and documents. Knows neither mounts nor how a source is detected.
"""
