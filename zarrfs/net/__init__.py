"""Requests to servers: HTTP, object stores, every protocol of fsspec, zip members; and what a source may reach.

Knows URLs and byte ranges. Knows neither caches nor keys.
"""
