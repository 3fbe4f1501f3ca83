"""Which codecs of older generations make a pipeline of v3.

Source: Zarr v3 core, "Codecs"; numcodecs; which of them zarr-python 3.1 takes in a pipeline of v3.
"""

from __future__ import annotations

from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.members import TO_ARRAYS
from zarrfs.zarr.model import ArrayMetadata

PREFIX = "numcodecs."
_FILTERS = TO_ARRAYS - {"categorize"}
_COMPRESSORS = frozenset(
    (
        "blosc", "lz4", "zstd", "zlib", "gzip", "bz2", "lzma", "shuffle", "crc32", "crc32c", "adler32", "fletcher32",
        "jenkins_lookup3",
    )
)  # fmt: skip
_STEPS = {  # 0: array -> array, 1: array -> bytes, 2: bytes -> bytes
    "transpose": 0, "bytes": 1, "vlen-utf8": 1, "vlen-bytes": 1, "blosc": 2, "gzip": 2, "zstd": 2, "crc32c": 2,
    f"{PREFIX}pcodec": 1, f"{PREFIX}zfpy": 1,
    **{PREFIX + name: 0 for name in _FILTERS},
    **{PREFIX + name: 2 for name in _COMPRESSORS},
}  # fmt: skip


def check_order(array: ArrayMetadata) -> None:
    """MetadataError where v3 has no such codec, or not there: those of arrays go first, then one that makes bytes."""
    at = 0
    for spec in array.codecs:
        step = _STEPS.get(spec.name)
        name = spec.name.removeprefix(PREFIX)
        if step is None:
            raise MetadataError(f"codec {name}, which Zarr v3 does not have")
        if step < at or step == at == 1 or (step == 2 and not at):
            raise MetadataError(f"codec {name} behind one that makes bytes")
        at = step
    if not at:
        raise MetadataError("no codec that makes bytes of the array")
