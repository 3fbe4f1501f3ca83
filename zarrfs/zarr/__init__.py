"""The Zarr formats as pure functions: metadata documents, data types, fill values, chunk grids, keys and codecs.

keys.py converts chunk keys to indices in the chunk grid and back; codecs.py decodes chunks. The functions take bytes
and return values. They use neither stores nor files, and perform no input or output, except that codecs of other
packages usually run in a child process.
"""

# Metadata documents: a directory with any one of these is a node
NODE_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", "__zmeta__", "meta")
# By metadata document, the document with the attributes of the node; zarr.json holds the attributes itself
ATTRIBUTE_DOCUMENTS = {".zarray": ".zattrs", ".zgroup": ".zattrs", "__zmeta__": "__zattr__", "meta": "attrs"}
# The names of all metadata documents: every other key of a node is a chunk
DOCUMENTS = (*NODE_DOCUMENTS, ".zmetadata", *dict.fromkeys(ATTRIBUTE_DOCUMENTS.values()))
DOCUMENT_MAX = 256 << 20  # bytes; longer documents are not read


def is_litter(name: str) -> bool:
    """Return True for names of files that writers leave behind: `__zattr__.lock`, `0.0.<uuid>.partial`."""
    return name.endswith((".lock", ".partial"))
