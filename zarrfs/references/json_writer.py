"""JsonWriter, which writes a reference set as JSON, entry by entry.

Source: the fsspec reference set specification. fsspec must read the same bytes from the set, both with its simple
templates (the default) and with jinja2.
"""

from __future__ import annotations

import base64
import contextlib
from typing import IO, Any

import orjson

from zarrfs.config import urls
from zarrfs.errors import InvalidKey
from zarrfs.references.gen import RENDERED_MAX
from zarrfs.references.keys import BASE64
from zarrfs.store.api import Reference
from zarrfs.system.buffers import Buffer

_AT_ONCE = 4096  # entries that are encoded together,
_BYTES_AT_ONCE = 1 << 20  # unless their inline bytes reach this number before

# In version 1 a URL that contains "{{" is a template. Its special characters are replaced by these templates, so that
# it renders to itself: with jinja2, which would also interpret "{%" and drop a final newline, and with fsspec's
# str.format, which interprets every brace.
_TEMPLATES = {"lbrace": "{", "rbrace": "}", "lf": "\n", "cr": "\r"}
_ESCAPES = str.maketrans({char: f"{{{{{name}}}}}" for name, char in _TEMPLATES.items()})


class JsonWriter:
    """A writer of references to the binary `file`, as a set of `version` 0 or 1.

    The document is complete after commit(). The caller closes the file.
    """

    def __init__(self, file: IO[bytes], version: int = 1) -> None:
        self._file, self._version = file, version
        self._batch: dict[str, Any] = {}
        self._held = 0  # inline bytes in the batch
        self._began = self._templates = False

    def add(self, reference: Reference) -> None:
        """Add one entry. Entries are written in batches.

        Raise InvalidKey if a set of this version cannot hold it, perhaps only when the batch of the entry is written.
        """
        key, data, url, offset, length = reference
        if data is None and len(url) > RENDERED_MAX:
            data = _contained(reference)
        if data is not None:
            self._batch[key] = inline_text(data)
            self._held += len(data)
        else:
            if "{{" in url and self._version:
                url, self._templates = url.translate(_ESCAPES), True
            self._batch[key] = [url] if length is None else [url, offset, length]
        if len(self._batch) >= _AT_ONCE or self._held >= _BYTES_AT_ONCE:
            self._flush()

    def commit(self) -> None:
        """Write the rest of the document. Raise InvalidKey as add() does."""
        self._flush()
        if not self._began:
            self._begin()
        self._file.write(b"}")
        if self._version:
            # After refs, because only now it is known whether they are needed. Readers of a set without templates do
            # not need jinja2.
            self._file.write(b',"templates":' + orjson.dumps(_TEMPLATES) if self._templates else b"")
            self._file.write(b"}")
        self._file.write(b"\n")

    def _begin(self) -> None:
        self._file.write(b'{"version":1,"refs":{' if self._version else b"{")
        self._began = True

    def _flush(self) -> None:
        if not self._batch:
            return
        if not self._version and "version" in self._batch:
            raise InvalidKey(
                "version", "a key that makes a document one of version 1: zarrfs refs convert writes such a set"
            )
        if self._began:
            self._file.write(b",")
        else:
            self._begin()
        self._file.write(memoryview(orjson.dumps(self._batch))[1:-1])
        self._batch, self._held = {}, 0


def _contained(reference: Reference) -> bytes:
    """Return the bytes of a reference to a data: URL that is too long for JSON.

    Raise InvalidKey if the URL is of another kind or malformed, or ends before the range of the reference.
    """
    key, _data, url, offset, length = reference
    if urls.is_data(url):
        with contextlib.suppress(ValueError):
            data = urls.data_in(url)
            if length is None:
                return data
            if offset + length <= len(data):
                return data[offset : offset + length]
    raise InvalidKey(key, f"a URL over {RENDERED_MAX} characters, which no JSON set can hold")


def inline_text(data: Buffer) -> str:
    """Return `data` as an inline value: as text if it is UTF-8 and does not begin with "base64:", else in base64."""
    raw = bytes(data)
    if not raw.startswith(BASE64):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            pass
    return (BASE64 + base64.b64encode(raw)).decode()
