"""Documents that describe a tree: decompress them, parse them in slices, and compile them to an index.

This package knows JSON and the index. Each format has its own package: references/ and archives/.
"""
