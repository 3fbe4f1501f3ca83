"""zarrfs as a library: blocking handles, arrays, mounts for a with block, stores for fsspec and zarr-python.

The functions are those of `import zarrfs`. This room must not know commands and terminals.
"""
