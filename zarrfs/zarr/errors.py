"""Errors of metadata documents, codecs and chunks."""

from __future__ import annotations

from zarrfs.errors import ZarrfsError


class MetadataError(ZarrfsError):
    """The error of a metadata document that breaks a rule of its format or uses an unsupported feature, see str()."""


class Unsupported(MetadataError):
    """The error of a document that follows the rules, but has an extension, a type or a size that is not supported."""


class CodecError(MetadataError):
    """The error of a damaged chunk, or of a codec that is not available; str() begins with the codec's name."""

    def __init__(self, codec: str, reason: str) -> None:
        self.codec, self.reason = codec, reason
        super().__init__(f"{codec}: {reason}")


def library_error(exc: Exception) -> str:
    """Return the message of another library's exception on one line, in at most 200 characters."""
    return " ".join(str(exc).split())[:200] or type(exc).__name__
