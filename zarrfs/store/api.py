"""The types that the whole program uses: keys, Info, and the Store and Value classes.

Source: Zarr v3 core protocol, abstract store interface, and the file system store 1.0 (key translation).
"""

from __future__ import annotations

import abc
import enum
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import trio

from zarrfs.errors import InvalidKey, NameTooLong, NotFound, OutOfRange, TargetChanged, TargetMissing, ZarrfsError
from zarrfs.system.buffers import Buffer

NAME_MAX = 255  # bytes of UTF-8, as in every Linux file system
KEY_MAX = 4095  # bytes: the longest path that Linux accepts


class Kind(enum.IntEnum):
    """The kind of a directory entry; the values are stored in indexes."""

    FILE = 0
    DIRECTORY = 1
    SYMLINK = 2


FILE_TYPES = {Kind.FILE: stat.S_IFREG, Kind.DIRECTORY: stat.S_IFDIR, Kind.SYMLINK: stat.S_IFLNK}  # of st_mode
KINDS = {file_type: kind for kind, file_type in FILE_TYPES.items()}


class Info(NamedTuple):
    """A directory entry, as listings return it."""

    name: str
    kind: Kind
    size: int | None = 0  # bytes; None: not known yet, info() requests it
    mode: int | None = None  # permission bits including setuid, setgid, sticky; None: the mount decides
    mtime_ns: int | None = None  # None: the mount decides
    target: str | None = None  # of a symlink
    allocated: int | None = None  # bytes allocated, if less than size (holes); None: all
    links: int = 1  # st_nlink; of a directory 2 + its subdirectories, or 1 if not counted
    identity: int | None = None  # changes when another file takes the name; None: not known
    unreadable: str = ""  # why it cannot be read, if that is known without opening it


SET_IDS = stat.S_ISUID | stat.S_ISGID


def ordinary_mode(info: Info) -> int:
    """Return the permission bits of an entry, for files without set-user-ID and set-group-ID.

    The user who mounts, copies or extracts becomes the owner, so a program in an untrusted archive could otherwise act
    as that user. Directories keep set-group-ID, which only chooses the group of new files. `info.mode` is not None.
    """
    assert info.mode is not None
    return info.mode if info.kind is Kind.DIRECTORY else info.mode & ~SET_IDS


class Usage(NamedTuple):
    """The numbers of statfs for a store; zeros if not known."""

    bytes: int = 0
    files: int = 0
    bytes_free: int = 0
    files_free: int = 0
    counted: bool = False  # `bytes` and `files` were counted in the source itself


class Reference(NamedTuple):
    """A file of a reference set: inline bytes, a range of a target, or all of a target."""

    key: str
    data: Buffer | None = None  # inline bytes; the fields below are then unused
    url: str = ""  # as written in the set: may be relative
    offset: int = 0
    length: int | None = None  # bytes; None: all of the target


class Value(abc.ABC):
    """One version of one value, open for reading.

    An open value never changes: a read returns bytes of this version or raises an error. Reads may run concurrently,
    in any order. The opener calls close() when no read is under way; a second close() does nothing.
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

    @abc.abstractmethod
    async def read(self, start: int, length: int) -> Buffer:
        """Return the bytes [start, start + length), cut at the end of the value.

        Raise TargetChanged if the store now has another version, ReadError if the bytes cannot be read.
        """

    def fileno(self) -> int | None:
        """Return a descriptor of a file that holds this value from offset 0 on; None if there is no such file.

        FUSE reads, copies and hashes use the descriptor in place of read(), because that is faster.
        """
        return None

    def close(self) -> None:  # noqa: B027  (most values hold nothing)
        """Release the resources of the value."""


class Store(abc.ABC):
    """A read-only tree of keys and values; the operations are those of the Zarr v3 store API.

    Keys are names joined by "/"; the root is "". All methods run on the trio loop. NotFound, NotDirectory, IsDirectory
    and InvalidKey are definite answers about a key; a ReadError means that an entry is listed, or may exist, but
    cannot be read. A subclass implements info(), list_dir(), open() and aclose(). All other methods have defaults, so
    that callers need not know which kind of store they have.
    """

    immutable: bool = False  # no key ever changes: the kernel may cache names, attributes and pages indefinitely
    sizes_known: bool = False  # the sizes of all files are known without a request to a target
    has_links: bool = False  # there may be symbolic links: keys for info(), list_dir() and open() come from followed()

    async def lists(self, prefix: str) -> bool:
        """Return whether list_dir() of a directory yields all existing names, without a request for each of them."""
        return True

    @abc.abstractmethod
    async def info(self, key: str, sized: bool = True) -> Info:
        """Return the entry of `key`. Raise NotFound, or ReadError if its size cannot be determined.

        Unless `sized`, no request is sent for the size: it is None if only a target knows it.
        """

    @abc.abstractmethod
    def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        """Yield the children of `prefix` that come after the name `after`, or all of them.

        The order is fixed: by name (code points) unless the store documents another one. `after` is a name from an
        earlier listing; if the listing is sorted, any name. Raise ReadError if the directory cannot be listed: it
        never appears empty.
        """

    @abc.abstractmethod
    async def open(self, key: str) -> Value:
        """Open the current version of a value. Raise NotFound, IsDirectory or ReadError."""

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return the bytes [start, start + length) of a value, cut at its end; without `length`, all from `start` on.

        All bytes are of one version: a value that changes after it was opened is opened and read once more.
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
            # cut here: read() may allocate memory for all of `length`
            return await value.read(start, rest if length is None else min(length, rest))
        finally:
            value.close()

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the key of every file and symbolic link below a directory; list() is list_prefix("")."""

        def failed(directory: str, exc: Exception) -> None:
            if self.immutable or directory == prefix or not isinstance(exc, NotFound):
                raise exc  # else it was removed since its parent was listed

        async with aclosing(cast(AsyncGenerator[tuple[str, Info], None], walk(self, prefix, failed))) as found:
            async for key, info in found:
                if info.kind is not Kind.DIRECTORY:
                    yield key

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        """Return where the bytes of a value are, ready for JSON: {"inline": size}, {"url", "offset", "length"}, ...

        By default, URLs are for messages. Unless `shown`, they are for a reference set: the path of a local file; the
        URL of a target as its document has it (perhaps relative, with its query); the URL of a value on a server,
        without credentials. Raise ReadError if no URL leads to the value.
        """
        await self.info(key, sized=False)
        return {}

    async def usage(self) -> Usage:
        """Return the numbers for statfs; send no request to a server."""
        return Usage()

    @property
    def remote(self) -> bool:
        """Return whether values are known to be read over a network, so that prefetch() is useful."""
        return False

    async def prefetch(self, keys: Sequence[str]) -> None:  # noqa: B027
        """Fetch values into the cache, only the beginning of large ones; neighbours share a request.

        Return when all are cached; if cancelled, drop unfinished requests that no reader waits for. Skip a value that
        cannot be fetched: its reader gets the error.
        """

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why entries at or below `key` are left out, by key.

        The result has only entries that were already examined.
        """
        return {}

    async def about(self) -> dict[str, Any]:
        """Return the description of the source for `zarrfs info`, ready for JSON."""
        return {}

    async def problems(self) -> list[tuple[str, str]]:
        """Return (entry, rule) for every entry of the source's document that is left out because it breaks a rule."""
        return []

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Release descriptors, connections and threads; a second call does nothing. Close all open values first."""


class WritableStore(Store):
    """A store with the operations that write: set() and delete()."""

    @abc.abstractmethod
    async def set(self, key: str, value: Buffer) -> None:
        """Store a value whole or not at all; make the directories above it.

        A reader sees the old value or the new one. Raise IsDirectory, NotDirectory, InvalidKey; OSError if it cannot
        be written.
        """

    @abc.abstractmethod
    async def delete(self, key: str) -> None:
        """Remove a file, a link, or a directory with everything below it. Raise NotFound, NotDirectory, OSError."""


class WrappingStore(Store):
    """A store over the store `lower`, for example a view.

    It passes on lists(), usage(), remote, problems() and aclose(). A subclass implements the
    other methods, or inherits the defaults of Store.
    """

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

    async def problems(self) -> list[tuple[str, str]]:
        return await self.lower.problems()

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
    """Return `key` if it is valid, else raise InvalidKey (or NameTooLong) with the rule. `root`: "" is valid, too."""
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


async def walk(
    store: Store,
    prefix: str = "",
    failed: Callable[[str, Exception], None] | None = None,
) -> AsyncIterator[tuple[str, Info]]:
    """Yield (key, entry) of everything below `prefix`, a directory before its children, names in order.

    Holds one open listing per level and nothing else. If a directory cannot be listed, raise the error, or pass it to
    `failed` and skip the rest of the directory.
    """
    levels = [(prefix, store.list_dir(prefix))]  # an explicit stack: trees may be deeper than Python's recursion limit
    try:
        while levels:
            directory, listing = levels[-1]
            try:
                info = await anext(listing, None)
            except (ZarrfsError, OSError) as exc:
                if failed is None:
                    raise
                failed(directory, exc)
                info = None
            if info is None:
                levels.pop()
                continue
            key = join_key(directory, info.name)
            await trio.lowlevel.checkpoint_if_cancelled()  # Ctrl-C comes here, too
            yield key, info
            if info.kind is Kind.DIRECTORY:
                levels.append((key, store.list_dir(key)))
    finally:
        for _, listing in reversed(levels):
            await cast(AsyncGenerator[Info, None], listing).aclose()
