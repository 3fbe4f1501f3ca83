"""The store API, and the stores that hold bytes themselves: directory, index, remote tree, overlay.

Knows neither FUSE nor the documents that an index is compiled from.
"""
