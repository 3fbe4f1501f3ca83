"""The store API, and the stores that hold bytes themselves."""
