"""Parsing, reading and creation of file archives (Flux RFC 37) and their blobs (RFC 10).

This package knows stores and documents. It knows neither mounts nor how a source is detected.
"""
