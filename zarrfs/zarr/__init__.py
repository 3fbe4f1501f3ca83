"""The formats of Zarr: pure functions, no input or output."""

NODE_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", "__zmeta__", "meta")  # of which one makes a node
ATTRIBUTE_DOCUMENTS = {".zarray": ".zattrs", ".zgroup": ".zattrs", "__zmeta__": "__zattr__", "meta": "attrs"}
DOCUMENTS = (*NODE_DOCUMENTS, ".zmetadata", *dict.fromkeys(ATTRIBUTE_DOCUMENTS.values()))  # all names beside chunks
