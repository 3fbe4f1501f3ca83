"""Errors of metadata documents and chunks, and the type of parsed JSON."""

from __future__ import annotations

from typing import Any

from zarrfs.errors import ZarrfsError

JSON = Any  # what json.loads() returns


class MetadataError(ZarrfsError):
    """A metadata document that breaks a rule, or asks for what nobody here understands; str() is the rule."""


class CodecError(MetadataError):
    """A chunk that does not decode, or a codec that is missing; str() names the codec first."""

    def __init__(self, codec: str, reason: str) -> None:
        self.codec, self.reason = codec, reason
        super().__init__(f"{codec}: {reason}")
