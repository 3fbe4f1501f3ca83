"""The Zarr formats as pure functions: metadata documents, data types, fill values, chunk grids, keys and codecs.

keys.py turns chunk keys into places in the grid, and back; codecs.py decodes chunks. This room takes bytes and returns
values. It knows neither stores nor files, and it performs no input or output, except that codecs of other packages run
in a child process.
"""

# Names of documents, of which any one makes its directory a node
NODE_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", "__zmeta__", "meta")
# The document that holds the attributes of a node; in zarr.json they are a member
ATTRIBUTE_DOCUMENTS = {".zarray": ".zattrs", ".zgroup": ".zattrs", "__zmeta__": "__zattr__", "meta": "attrs"}
# Every metadata name: all other keys of a node are chunks
DOCUMENTS = (*NODE_DOCUMENTS, ".zmetadata", *dict.fromkeys(ATTRIBUTE_DOCUMENTS.values()))
