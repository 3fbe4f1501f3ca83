"""The store API, and the stores that hold bytes themselves: directory, index, remote tree, overlay.

directory.py, index.py, remote.py and unlisted.py are stores: there a key becomes a path, a row of the index, or a URL.
overlay.py and upper.py write changes and whiteouts; traversal.py follows symbolic links of stores and archives. Knows
neither FUSE nor the documents that an index is compiled from.
"""
