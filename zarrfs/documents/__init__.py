"""Documents that describe a tree: decompressed, parsed in slices, compiled to an index.

Knows JSON and the index. Each format has a room of its own: references/ and archives/.
"""
