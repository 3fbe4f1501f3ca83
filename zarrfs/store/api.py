"""The vocabulary of the whole program: keys, Info, and the Store and Value classes.

Source: Zarr v3 core protocol, abstract store interface, and the file system store 1.0 (key translation).
"""

from __future__ import annotations

import abc
import enum
import stat
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zarrfs.config.shares import WHOLE, Share
from zarrfs.errors import InvalidKey, NameTooLong, NotFound, OutOfRange, ReadError, TargetChanged, TargetMissing
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.config.options import Options

NAME_MAX = 255  # bytes of UTF-8, as in every Linux file system
KEY_MAX = 4095  # bytes: the longest path that Linux takes


class Kind(enum.IntEnum):
    """The kind of a directory entry; the values are stored in indexes."""

    FILE = 0
    DIRECTORY = 1
    SYMLINK = 2


class Info(NamedTuple):
    """A directory entry, as listings return it."""

    name: str
    kind: Kind
    size: int | None = 0  # bytes; None: not known yet, info() requests it
    mode: int | None = None  # permission bits including setuid, setgid, sticky; None: the mount decides
    mtime_ns: int | None = None  # None: the mount decides
    target: str | None = None  # of a symlink
    allocated: int | None = None  # bytes held, where less than size (holes); None: all
    links: int = 1  # st_nlink; of a directory 2 + its subdirectories, or 1 if not counted
    identity: int | None = None  # changes when another file takes the name; None: not known
    unreadable: str = ""  # why its bytes cannot be read, if that is known without opening it


PlainPart = tuple[int, int, Buffer | None, str, int]  # start, length, data, url and offset of a Part
# name, kind, size, mode, mtime_ns, allocated and target of an Info; the parts of a file, None if not known
Entry = tuple[str, int, int | None, int | None, int | None, int | None, str | None, list[PlainPart] | None]

SET_IDS = stat.S_ISUID | stat.S_ISGID


def ordinary_mode(info: Info) -> int:
    """Return permission bits without set-user-ID and set-group-ID of files, as no source has trusted owners.

    The user who mounts, copies or extracts becomes the owner, so a stranger's archive could act as that user.
    Directories keep set-group-ID, which only chooses the group of new files. `info.mode` is not None.
    """
    assert info.mode is not None
    return info.mode if info.kind is Kind.DIRECTORY else info.mode & ~SET_IDS


class Usage(NamedTuple):
    """The numbers of statfs for a store; zeros if not known."""

    bytes: int = 0
    files: int = 0
    bytes_free: int = 0
    files_free: int = 0
    counted: bool = False  # `bytes` and `files` are those of the source itself, counted


class Reference(NamedTuple):
    """A file of a reference set: inline bytes, a range of a target, or all of a target."""

    key: str
    data: Buffer | None = None  # inline; the other fields are then unused
    url: str = ""  # as the set has it: perhaps relative
    offset: int = 0
    length: int | None = None  # bytes; None: all of the target


class Fault(NamedTuple):
    """A fault of a reference set; a warning costs the set nothing."""

    entry: str  # where in the set: refs["x/0"], gen[2].url, x/refs.0.parq; "" for the whole
    rule: str
    warning: bool = False


class Absences(NamedTuple):
    """The counts of absent and possible record files of a Parquet set."""

    absent: int
    record_files: int
    first: str = ""  # the first absent one


class Value(abc.ABC):
    """One version of one value, open for reading.

    What is open never changes under its reader: a read returns bytes of this version or raises. Reads may overlap and
    come in any order. The opener calls close() when no read is under way; calling it again does nothing.
    """

    __slots__ = ("info", "version")

    info: Info  # as it was when the value was opened; its size is known
    version: Hashable | None  # equal for two openings only if the bytes are equal; None: not known

    def __init__(self, info: Info, version: Hashable | None = None) -> None:
        self.info, self.version = info, version

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.info.size or 0

    @property
    def pinned(self) -> Hashable:
        """Equal for two openings only if their reads return the same bytes at any time: what a handle stands for."""
        return ("size", self.size) if self.version is None else self.version

    @abc.abstractmethod
    async def read(self, start: int, length: int) -> Buffer:
        """Return the bytes [start, start + length), cut at the end of the value.

        Raises TargetChanged if the store has another version by now, ReadError if the bytes cannot be read.
        """

    def fileno(self) -> int | None:
        """Return a descriptor of a file that holds this value from offset 0 on; None if there is no such file.

        The fast path: FUSE reads, copies and hashes use it in place of read().
        """
        return None

    def close(self) -> None:  # noqa: B027  (most values hold nothing)
        """Release what the value holds."""


class Store(abc.ABC):
    """A read-only tree of keys and values; the operations are those of the Zarr v3 store API.

    Keys are "/"-joined names; the root is "". All methods run on trio. NotFound, NotDirectory, IsDirectory and
    InvalidKey are answers; a ReadError says that what is listed, or may be there, cannot be had. A subclass gives
    info(), list_dir() and open(); whatever else a store is able to do has a default here, so that no caller asks what
    kind of store it has.
    """

    immutable: bool = False  # no key ever changes: the kernel may cache names, attributes and pages for good
    knows_names: bool = False  # names are looked up and listed without a request to a server
    is_reference_set: bool = False  # references() and faults() have something to say
    merged: bool = False  # open() follows a link in one of several layers: resolve links before, by info()

    @property
    def sizes_known(self) -> bool:
        """Whether the sizes of all files are known without a request to a target."""
        return False

    async def lists_same_sizes(self) -> bool:
        """Return whether listings tell every process the same sizes, whatever it has read before."""
        return False

    async def lists(self, prefix: str) -> bool:
        """Return whether list_dir() of a directory has the names that are there, without a request for each."""
        return True

    @abc.abstractmethod
    async def info(self, key: str, sized: bool = True) -> Info:
        """Return the entry of `key`. NotFound; ReadError if its size cannot be determined.

        Unless `sized`, no request is sent for the size: it is None if only a target knows it.
        """

    @abc.abstractmethod
    def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        """Yield the children of `prefix` that come after the name `after`, or all of them.

        The order is fixed, and by name (code points) unless the store documents another one. `after` is a name of an
        earlier listing; in a sorted listing, any name. A directory that cannot be listed raises ReadError, and never
        appears empty.
        """

    @abc.abstractmethod
    async def open(self, key: str) -> Value:
        """Open the present version of a value. NotFound, IsDirectory, ReadError."""

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return the bytes [start, start + length) of a value, cut at its end; without a length all the rest.

        They are of one version: where another one came after the value was opened, it is opened and read anew, once.
        """
        try:
            return await self._open_and_read(key, start, length)
        except (TargetChanged, TargetMissing, OutOfRange):
            if self.immutable:
                raise
        return await self._open_and_read(key, start, length)

    async def _open_and_read(self, key: str, start: int, length: int | None) -> Buffer:
        value = await self.open(key)
        try:
            rest = max(0, value.size - start)
            return await value.read(start, rest if length is None else min(length, rest))  # no memory beyond
        finally:
            value.close()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the key of every file and symbolic link below a directory; list() is list_prefix("")."""
        return keys_below(self, prefix)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        """Return where the bytes of a value are, ready for JSON: {"inline": size}, {"url", "offset", "length"}, ...

        Unless `shown`, the URL is not for messages, but for a reference set: of a local file the path; of a target the
        URL as its document has it (perhaps relative, with its query); of a value on a server a URL without
        credentials. ReadError if no URL leads to the value.
        """
        await self.info(key, sized=False)
        return {}

    async def usage(self) -> Usage:
        """Return how much the store holds, without a request to a server."""
        return Usage()

    @property
    def remote(self) -> bool:
        """Whether values came over a network so far, so that prefetch() gains something."""
        return False

    async def get_ready(self) -> None:  # noqa: B027
        """Import and start what the first read over a network takes, if there are remote values; send no request."""

    async def prefetch(self, keys: Sequence[str]) -> None:  # noqa: B027
        """Bring values into the cache, of large ones the beginning; neighbours in one request.

        Returns when they are cached; cancelling it drops unfinished requests without a reader. A value that cannot be
        fetched is left out: its reader gets the error.
        """

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why entries at or below `key` are left out, by key, as far as they have been examined."""
        return {}

    async def form(self, key: str) -> tuple[str, str] | None:
        """Return (what a view of another Zarr version shows of the chunks of an array, why); None of other stores.

        The reason is "" unless chunks are decoded.
        """
        return None

    async def check(self) -> None:  # noqa: B027
        """Examine everything that a view has to translate; ReadError for the first invalid or unsupported node."""

    async def about(self) -> dict[str, Any]:
        """Return the description of the source for `zarrfs info`, ready for JSON."""
        return {}

    async def problems(self) -> list[tuple[str, str]]:
        """Return (entry, rule) of every entry of the source's document that is left out because it breaks a rule."""
        return []

    async def absences(self, prefix: str = "", ask: bool = True) -> Absences | None:
        """Count the absent record files of a Parquet set at and below `prefix`; None: this is no Parquet set.

        Unless `ask`, no file is read for that, and the result may also be None.
        """
        return None

    async def faults(self, share: Share = WHOLE) -> AsyncIterator[Fault]:
        """Yield every fault of a reference set, or a share of them: what cannot be divided is in the first share."""
        return
        yield  # makes it a generator

    async def references(self) -> AsyncIterator[Reference]:
        """Yield every file of a reference set, in the order of list_prefix("").

        ReadError where part of the set cannot be had, and where this is no reference set.
        """
        raise ReadError("/", "is no reference set")
        yield  # makes it a generator

    def blocking(self) -> BlockingReader | None:
        """Return a reader of the same tree for threads and forked processes; None if reads need the event loop."""
        return None

    def export_entry(self, key: str) -> bytes:
        """Return what this store has in memory of a file, for another process that has the same store open."""
        return b""

    def import_entry(self, key: str, exported: bytes) -> None:  # noqa: B027
        """Take over what export_entry() has returned in another process."""

    def share_looks(self, looks: Looks) -> None:  # noqa: B027
        """Believe of a source that changes only what is, by `looks`, what any process of the mount saw last."""

    def hide_document_time(self) -> None:  # noqa: B027
        """Show entries that have no time of their own without one, not with their document's time."""

    def forbid_device(self, device: int) -> None:  # noqa: B027
        """Refuse targets on the file system `device` (st_dev), which is the mount that shows this very store."""

    def adjust(self, options: Options) -> None:  # noqa: B027
        """Apply new bounds on memory, disk and requests (daemon/live_options.py lists the options that may change)."""

    def stats(self) -> dict[str, Any]:
        """Return counters."""
        return {}

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Release descriptors, connections and threads; the second call does nothing. Close open values before."""


class Looks(Protocol):
    """The versions of documents and values that any process of a mount has seen last."""

    def begin(self, what: str) -> int:
        """Return a number for ended(). Call it before something is looked at."""
        ...

    def ended(self, what: str, version: Hashable, begun: int) -> None:
        """Note the version that was seen, None for nothing, unless another process has noted one meanwhile."""
        ...

    def holds(self, what: str, version: Hashable) -> bool:
        """Return whether a version is the one that was seen last; False if that is not known."""
        ...


class WritableStore(Store):
    """A store that can change."""

    @abc.abstractmethod
    async def set(self, key: str, value: Buffer) -> None:
        """Store `value` atomically: a reader sees the old value or the new one, never a mixture."""

    @abc.abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a file, or a directory with everything below it."""


class Part(NamedTuple):
    """`length` bytes of a file from `start` on: `data`, or those of `url` from `offset` on."""

    start: int
    length: int
    data: Buffer | None
    url: str = ""
    offset: int = 0


class BlockingReader(abc.ABC):
    """A reader of a store that needs no event loop: every method blocks, and runs in any thread or forked process.

    Values are files (`opens_files`), or are made of parts: bytes of the store, and blobs that lie in local files.
    """

    opens_files: bool = False
    serves_most: bool = True  # few values, if any, need the event loop
    skip_warned: bool = False  # leave blobs whose source has failed before to the event loop, which warns once

    @abc.abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield all entries of a directory, in the order of list_dir(). StoreError."""

    def open_file(self, key: str) -> int:
        """Open a value that is a file; the caller closes the descriptor. StoreError, ReadError."""
        raise NotImplementedError

    def parts_in(self, prefix: str, names: Sequence[str]) -> dict[str, list[Part] | None]:
        """Return the parts of files in a directory, by name; None for files that need the event loop."""
        return {}

    def parts(self, key: str, start: int, stop: int) -> list[Part] | None:
        """Return the parts of the bytes [start, stop) of one file, cut at both ends; None as in parts_in()."""
        return None

    def blob(self, url: str) -> memoryview | None:
        """Return all bytes of a blob, verified; None if that needs the event loop."""
        return None


class WrappingStore(Store):
    """A store over another one, to which it passes every call that it does not change: overlays and views."""

    def __init__(self, lower: Store) -> None:
        self.lower = lower
        self.immutable = lower.immutable

    async def lists(self, prefix: str) -> bool:
        return await self.lower.lists(prefix)

    async def usage(self) -> Usage:
        return await self.lower.usage()

    @property
    def remote(self) -> bool:
        return self.lower.remote

    async def get_ready(self) -> None:
        await self.lower.get_ready()

    def forbid_device(self, device: int) -> None:
        self.lower.forbid_device(device)

    def adjust(self, options: Options) -> None:
        self.lower.adjust(options)

    def stats(self) -> dict[str, Any]:
        return self.lower.stats()

    async def aclose(self) -> None:
        await self.lower.aclose()


def name_rule(name: str) -> str | None:
    """Return the rule that `name` breaks as one part of a key, or None."""
    if name in ("", ".", ".."):
        return f"a part {name!r}" if name else "an empty part"
    if "\0" in name:
        return "a NUL character"
    if len(name) > NAME_MAX // 4:
        try:
            size = len(name.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            return "a lone surrogate"
        if size > NAME_MAX:
            return f"a name over {NAME_MAX} bytes (ENAMETOOLONG)"
    return None


def key_rule(key: str) -> str | None:
    """Return the rule that `key` breaks as the key of a file, or None."""
    if not key:
        return "an empty key"
    if key[0] == "/":
        return "an absolute key"
    for name in key.split("/"):
        rule = name_rule(name)
        if rule:
            return rule
    return None


def check_key(key: str, root: bool = False) -> str:
    """Return `key`; raise InvalidKey (or NameTooLong) naming the rule. `root` admits ""."""
    if root and not key:
        return key
    rule = key_rule(key)
    if rule:
        raise (NameTooLong if "ENAMETOOLONG" in rule else InvalidKey)(key, f"not a key: {rule}")
    return key


def split_key(key: str) -> tuple[str, str]:
    """Return (parent prefix, name): "a/b/c" -> ("a/b", "c")."""
    parent, _, name = key.rpartition("/")
    return parent, name


def join_key(prefix: str, name: str) -> str:
    """Return the key of `name` in the directory `prefix`."""
    return f"{prefix}/{name}" if prefix else name


async def keys_below(store: Store, prefix: str) -> AsyncIterator[str]:
    """Yield list_prefix() of a store from its list_dir(), with one open listing a level."""
    levels = [(prefix, store.list_dir(prefix))]  # an explicit stack: trees may be deeper than Python's recursion limit
    while levels:
        above, listing = levels[-1]
        try:
            async for info in listing:
                key = join_key(above, info.name)
                if info.kind is Kind.DIRECTORY:
                    levels.append((key, store.list_dir(key)))
                    break
                yield key
            else:
                levels.pop()
        except NotFound:
            if store.immutable or len(levels) == 1:
                raise
            levels.pop()  # removed since its parent was listed
