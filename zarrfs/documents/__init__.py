"""Documents that describe a tree: found compressed or plain, parsed in slices, compiled to an index.

Knows JSON and the index. Each format has a room of its own: references/ and archives/.
"""
