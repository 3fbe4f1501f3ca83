"""Decoding of chunks: a pipeline of codecs, told in the words of Zarr v3, run backwards.

Blosc frames go through numcodecs, which carries C-Blosc 1.21 with every inner codec but snappy; frames that it
cannot read are taken apart in zarrfs.zarr.frames, so no second blosc binding is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarrfs.zarr.model import ArrayMetadata, MetadataError

if TYPE_CHECKING:
    import numpy as np

    from zarrfs.transfer.api import Buffer


class CodecError(MetadataError):
    """A chunk that does not decode, or a codec that is missing; str() names the codec first."""

    def __init__(self, codec: str, reason: str) -> None:
        self.codec, self.reason = codec, reason
        super().__init__(f"{codec}: {reason}")


def decode_chunk(array: ArrayMetadata, data: Buffer) -> np.ndarray[Any, Any]:
    """The chunk that `data` holds, of full chunk shape; may be read-only, may be a view in any memory order.

    CodecError where the data is damaged, or where its codec is missing.
    """
    raise NotImplementedError


def check_codecs(array: ArrayMetadata) -> list[str]:
    """What nobody here decodes in the pipeline of `array`, one reason each; seen without data."""
    raise NotImplementedError
