"""System, the interface to servers and archives, and its results: entries, bytes, and failures that may be retried."""

from __future__ import annotations

import abc
import functools
import logging
from typing import NamedTuple

from zarrfs.errors import ReadError
from zarrfs.system.buffers import Buffer

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """Attributes of one name, as a server reports them."""

    name: str
    directory: bool
    size: int | None = None  # bytes; None: not reported
    mtime_ns: int | None = None
    tag: str | None = None  # changes with the value: an ETag, a checksum, a time
    html: bool = False  # an HTML page, which may be the listing of a directory
    strong: bool = False  # the tag is a strong ETag: it changes whenever any byte does
    rough: bool = False  # from an HTML listing: exact enough for stat(2), but not usable as a version
    identity: int | None = None  # of the version, if an earlier entry of it had fewer attributes; see store/remote.py


class Fetched(NamedTuple):
    """Bytes of a value, cut at its end, and the facts that came with them."""

    data: Buffer
    tag: str | None = None
    total: int | None = None  # size of the value in bytes, if known
    ranged: bool = True  # whether the server sent only the requested bytes
    mtime_ns: int | None = None
    html: bool = False  # the answer is an HTML page


class Page(NamedTuple):
    """A page of a flat listing: keys in the order of their UTF-8 bytes, relative to the listed path."""

    entries: list[tuple[str, Entry]]
    last: str  # the last key that the page covers: the next page begins after it
    more: bool  # whether there may be keys after these


class System(abc.ABC):
    """The interface to one place that has values: web servers, an object store, an archive, ...

    A system names values by paths of its own, which are whole URLs for HTTP. A method makes one attempt, and raises
    Transient if a retry may help, else ReadError. RemoteFiles retries, caches and checks.
    """

    immutable: bool = False  # its values never change
    nested: bool = False  # its values are members of an archive: reading them sends requests for the archive

    @property
    def sends_versions(self) -> bool:
        """Return whether size and version of a value come with its bytes."""
        return False

    @abc.abstractmethod
    async def fetch(self, path: str, start: int, stop: int | None) -> Fetched:
        """Return the bytes [start, stop) of a value, cut at its end.

        If `stop` is None, return all bytes to the end; raise ReadError if they exceed document_limit.
        """

    @abc.abstractmethod
    async def stat(self, path: str) -> Entry:
        """Return the entry at `path`. Raise TargetMissing if there is none."""

    @abc.abstractmethod
    async def listing(self, path: str) -> list[Entry] | None:
        """Return the entries of a directory, unsorted; None if the server shows no listing."""

    @property
    def flat(self) -> bool:
        """Return whether page() is supported."""
        return False

    async def page(self, path: str, after: str) -> Page:
        """Return up to 1,000 keys below `path`, relative to it, that follow the key `after`."""
        raise NotImplementedError

    def child(self, path: str, name: str) -> str:
        """Return the path of `name` in the directory `path`."""
        return f"{path.rstrip('/')}/{name}" if path else name

    @abc.abstractmethod
    def shown(self, path: str) -> str:
        """Return `path` as a URL without credentials."""

    @abc.abstractmethod
    def host(self, path: str) -> str:
        """Return the name of the server or bucket; limits on requests apply to each name."""

    @abc.abstractmethod
    def identity(self, path: str) -> str:
        """Return the identity of the value: the same in every process, without credentials."""

    async def aclose(self) -> None:  # noqa: B027  (fsspec closes its own)
        """Close connections and descriptors."""


def checked_page(entries: list[tuple[str, Entry]], after: str, more: bool, where: str) -> Page:
    """Return the page of these keys. Raise ReadError unless they are in order and follow `after`."""
    before = after.encode("utf-8", "surrogateescape")
    for key, _ in entries:
        at = key.encode("utf-8", "surrogateescape")
        if at <= before:
            raise ReadError(where, f"its listing is not in order: {key[:80]!r} came after {after[:80]!r}")
        before, after = at, key
    return Page(entries, after, more)


def too_large(where: str, limit: int) -> ReadError:
    """Return the error for a value that is too large to be fetched as a whole."""
    return ReadError(where, f"more than {limit} bytes")


_OUT = (429, 502, 503, 504, *range(520, 528))  # from gateways, or servers that are starting, stopping or too busy


class Transient(Exception):
    """A failure after which a retry may succeed.

    `after`: seconds that the server asked to wait. `status`: the HTTP status, if there was a response. `begun`: a
    response had begun, and was cut off or is wrong.
    """

    def __init__(self, reason: str, after: float = 0.0, status: int | None = None, begun: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.after, self.status, self.begun = reason, after, status, begun

    @property
    def of_value(self) -> bool:
        """Return whether only this value is affected: the server itself answered with an error or part of a body."""
        return self.begun or (self.status is not None and self.status not in _OUT)

    @property
    def asks_for_patience(self) -> bool:
        """Return whether the server asks to repeat the request later."""
        return self.status == 429 or (self.status == 503 and self.after > 0)


@functools.lru_cache(256)  # many values have the same time
def http_date(text: str | None) -> float | None:
    """Return the date in a header in seconds since 1970; None if it is invalid. Source: RFC 9110, section 5.6.7."""
    if not text:
        return None
    import email.utils

    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, OSError):
        log.debug("%s: not a date", text)
        return None
