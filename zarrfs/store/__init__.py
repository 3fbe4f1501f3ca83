"""The store API, and the basic stores: directory, index, remote tree, overlay.

directory.py, index.py, remote.py and unlisted.py are stores: they translate a key to a path, a row of an index, or a
URL. overlay.py and upper.py write changes and whiteouts; traversal.py walks any store and resolves its symbolic links;
followed.py shows a store without links.
This package knows neither FUSE nor the documents that an index is compiled from.
"""
