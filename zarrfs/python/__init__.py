"""zarrfs as a library: blocking handles, arrays, mounts for a with block, stores for fsspec and zarr-python.

`import zarrfs` offers its functions. This room must not know commands and terminals.
"""
