"""zarrfs as a library: the protocol `zarrfs` of fsspec, and mounts for a with block.

This room must not know commands and terminals.
"""
