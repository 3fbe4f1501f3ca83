"""Writing of reference sets in JSON, version 1, for `zarrfs commit`.

Source: the fsspec reference set specification. fsspec must read the same bytes from the set, both with its simple
templates (the default) and with jinja2.
"""

from __future__ import annotations

import base64
import functools
import json
import os
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import orjson

from zarrfs.config import urls
from zarrfs.config.redaction import without_secrets
from zarrfs.errors import InvalidKey, ReadError, SourceError
from zarrfs.references.gen import RENDERED_MAX
from zarrfs.references.keys import BASE64
from zarrfs.store.api import Reference, Store
from zarrfs.store.destination import is_utf8
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.documents.plan import Plan

NOT_UTF8 = "its path is not UTF-8, which a URL cannot hold"
_AT_ONCE = 4096  # entries that are encoded together,
_BYTES_AT_ONCE = 1 << 20  # unless their inline bytes reach this number before
_KNOWN = 65_536  # URLs whose new form is cached

# A URL that contains "{{" is a template. Its special characters are replaced by these templates, so that it renders to
# itself: with jinja2, which would also interpret "{%" and drop a final newline, and with fsspec's str.format, which
# interprets every brace.
_TEMPLATES = {"lbrace": "{", "rbrace": "}", "lf": "\n", "cr": "\r"}
_ESCAPES = str.maketrans({char: f"{{{{{name}}}}}" for name, char in _TEMPLATES.items()})


class JsonWriter:
    """A writer of references to the binary `file`. The set is complete after commit(); the caller closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._batch: dict[str, Any] = {}
        self._held = 0  # inline bytes in the batch
        self._before = b'{"version":1,"refs":{'
        self._templates = False

    def add(self, reference: Reference) -> None:
        """Add one entry. Raise InvalidKey if its URL is too long."""
        key, data, url, offset, length = reference
        if data is not None:
            self._batch[key] = _inline_text(data)
            self._held += len(data)
        else:
            if len(url) > RENDERED_MAX:
                raise InvalidKey(key, f"a URL over {RENDERED_MAX} characters, which no JSON set can hold")
            if "{{" in url:
                url, self._templates = url.translate(_ESCAPES), True
            self._batch[key] = [url] if length is None else [url, offset, length]
        if len(self._batch) >= _AT_ONCE or self._held >= _BYTES_AT_ONCE:
            self._flush()

    def commit(self) -> None:
        """Write the rest of the document."""
        self._flush()
        # templates follow refs, because only now it is known whether they are needed
        templates = b',"templates":' + orjson.dumps(_TEMPLATES) if self._templates else b""
        self._file.write((self._before if self._before != b"," else b"") + b"}" + templates + b"}\n")

    def _flush(self) -> None:
        if self._batch:
            self._file.write(self._before)
            self._file.write(memoryview(orjson.dumps(self._batch))[1:-1])
            self._batch, self._held, self._before = {}, 0, b","


def _inline_text(data: Buffer) -> str:
    """Return `data` as an inline value: as text if it is UTF-8 and does not begin with "base64:", else in base64."""
    raw = bytes(data)
    if not raw.startswith(BASE64):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            pass
    return (BASE64 + base64.b64encode(raw)).decode()


def moved_urls(plan: Plan, directory: str | None) -> Callable[[str], str]:
    """Return a function of URLs in the set of `plan`: what they are in a set in `directory` (None: anywhere)."""
    base = local_path(plan.base)
    if None not in (base, directory) and os.path.realpath(base or "") == os.path.realpath(directory or ""):
        return str
    return functools.lru_cache(_KNOWN)(lambda url: absolute(url, plan.base))


async def kept_reference(
    store: Store, plan: Plan, key: str, where: dict[str, Any], moved: Callable[[str], str]
) -> Reference:
    """Return the reference of a set to one file, which is at `where`, or its inline value. Raise ReadError.

    The `.zmetadata` of a Parquet set becomes consolidated metadata of Zarr.
    """
    if "url" in where:
        return Reference(key, None, moved(where["url"]), where.get("offset", 0), where.get("length"))
    data = await store.get(key)
    if plan.index is None and key == ".zmetadata":
        document = {"zarr_consolidated_format": 1} | json.loads(bytes(data))  # kerchunk omits it
        document.pop("record_size", None)
        data = json.dumps(document).encode()
    return Reference(key, data)


def reference_of(plan: Plan, key: str, where: dict[str, Any], size: int) -> Reference:
    """Return a reference to the bytes of one file of a Zarr store, which are at the URL of `where`.

    Raise ReadError; SourceError if no reference can name its bytes.
    """
    path = local_path(where["url"])
    if path is None:
        path = absolute(where["url"], plan.base)
    elif not os.access(path, os.R_OK):
        raise SourceError(plan.source, "permission denied", key)
    if not is_utf8(path):
        raise SourceError(plan.source, NOT_UTF8, key)
    return Reference(key, None, path, where.get("offset", 0), where.get("length", size))


def absolute(url: str, base: str) -> str:
    """Return `url` resolved against `base` as store.targets.Targets resolves it, without the credentials of `base`.

    Raise ReadError if `base` is a chain of URLs without a directory, or is not UTF-8.
    """
    relative = urls.relative_end(url)
    if relative is None:
        return url
    before, path = relative
    directory = local_path(base)
    if directory is not None:
        joined = os.path.join(directory, path)
        if not is_utf8(joined):
            raise ReadError(url, f"a relative target in {directory}: {NOT_UTF8}")
        return f"{before}file://{joined}" if urls.protocols(url) else joined
    remote = urls.join(without_secrets(base), path)
    if remote is None:
        raise ReadError(url, f"a relative target in {without_secrets(base)}: give its base with -o base=")
    return before + remote


def local_path(name: str) -> str | None:
    """Return the absolute local path of a source or base; None if it is a URL of another kind."""
    found = urls.protocols(name)
    if found and found not in (["file"], ["local"]):
        return None
    return os.path.abspath(urls.file_path(name) if found else name)
