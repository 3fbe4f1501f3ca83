"""Getting bytes, fast: local descriptors, the bridge to fsspec's loop, and the block cache."""
