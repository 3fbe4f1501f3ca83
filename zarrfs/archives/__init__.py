"""File archives (Flux RFC 37) and their blobs (RFC 10): parsed, read, created.

Knows stores and documents. Knows neither mounts nor how a source is detected.
"""
