"""The formats of Zarr: pure functions, no input or output."""
