"""The vocabulary of the whole program: keys, Info, and the Store protocol.

Source: Zarr v3 core protocol, abstract store interface, and the file system store 1.0 (key translation).
"""

from __future__ import annotations

import enum
import functools
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from zarrfs.errors import InvalidKey, NameTooLong, TargetChanged
from zarrfs.system.buffers import Buffer

if TYPE_CHECKING:
    from zarrfs.config.options import Options

NAME_MAX = 255  # bytes of UTF-8, as in every Linux file system


class Kind(enum.IntEnum):
    """What a directory entry is; the values are stored in indexes."""

    FILE = 0
    DIRECTORY = 1
    SYMLINK = 2


class Info(NamedTuple):
    """What a directory listing knows of one entry."""

    name: str
    kind: Kind
    size: int | None = 0  # bytes; None: not known yet, info() finds out
    mode: int | None = None  # permission bits including setuid, setgid, sticky; None: the mount decides
    mtime_ns: int | None = None  # None: the mount decides
    target: str | None = None  # of a symlink
    allocated: int | None = None  # bytes held, where less than size (holes); None: all
    links: int = 1  # st_nlink; of a directory 2 + its subdirectories, or 1 where nobody counted
    identity: int | None = None  # changes when another file takes the name; None: nobody can tell
    unreadable: str = ""  # why its bytes cannot be had, where that is known without opening it


PlainPart = tuple[int, int, Buffer | None, str, int]  # start, length, data, url and offset of a Part
# name, kind, size, mode, mtime_ns, held and target of an Info; of what a file is made, None where nobody can tell
Entry = tuple[str, int, int | None, int | None, int | None, int | None, str | None, list[PlainPart] | None]

SET_IDS = stat.S_ISUID | stat.S_ISGID


def ordinary_mode(info: Info) -> int:
    """Permission bits without what lets who executes a file act as its owner or group: no source tells who they are.

    Whoever mounts, copies or extracts becomes the owner, so a stranger's archive would act as him. Directories keep
    set-group-ID, which only says whose group new files get. `info.mode` is not None.
    """
    assert info.mode is not None
    return info.mode if info.kind is Kind.DIRECTORY else info.mode & ~SET_IDS


class Usage(NamedTuple):
    """What statfs tells of a store; zeros where nobody knows."""

    bytes: int = 0
    files: int = 0
    bytes_free: int = 0
    files_free: int = 0


@runtime_checkable
class Store(Protocol):
    """A read-only tree of keys and values.

    Keys are "/"-joined names; the root is "". Values are bytes. All methods run on trio. They raise
    NotFound, NotDirectory, IsDirectory or InvalidKey as answers, ReadError where bytes that are listed
    cannot be had. A failed get never returns short or wrong bytes.
    """

    immutable: bool  # the kernel may cache names, attributes and pages for good

    async def info(self, key: str, sized: bool = True) -> Info:
        """The entry of `key`, its size known. NotFound; ReadError where its size cannot be had.

        Not `sized`, the size is None where only a target could tell it: no question leaves the store.
        """
        ...

    def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        """The children of `prefix` that come after the name `after`, or all of them.

        In a fixed order of the store's own: by name (code points), but for one that says otherwise. `after` is
        a name that an earlier listing gave; where all are sorted, any name will do.
        """
        ...

    async def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """The bytes [start, start + length) of a value, cut at its end; length None: all the rest."""
        ...

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Every key of a file (or symlink) below the directory `prefix`; list() is list_prefix("")."""
        ...

    async def locate(self, key: str) -> dict[str, Any]:
        """Where the value's bytes are, ready for JSON: {"inline": size}, {"url", "offset", "length"}, ..."""
        ...

    async def usage(self) -> Usage:
        """How much the store holds; never touches the network."""
        ...

    async def aclose(self) -> None:
        """Give back descriptors, connections and threads."""
        ...


@runtime_checkable
class WritableStore(Store, Protocol):
    """A Store that can change."""

    async def set(self, key: str, value: Buffer) -> None:
        """Store `value`; atomic: a reader sees the old value or the new one, never half of it."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a file, or a directory with all below it."""
        ...


@runtime_checkable
class DescriptorStore(Store, Protocol):
    """A Store whose values are files of the operating system."""

    async def open_value(self, key: str) -> int:
        """A descriptor of the value, for the caller to close: it stays that value, whatever is set later."""
        ...


@runtime_checkable
class LocalStore(Store, Protocol):
    """A Store of files of this machine, which any thread or forked process may list and open; both block."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """All of a directory, in the order of list_dir(). StoreError."""
        ...

    def open_file(self, key: str) -> int:
        """As DescriptorStore.open_value."""
        ...


class Validator(NamedTuple):
    """What tells a value from those that come before and after it under its key. Source: RFC 9110, section 8.8."""

    value: Hashable
    info: Info  # its size known
    certain: bool = True  # no other value has the same; else it is likely at best


@runtime_checkable
class ValidatedStore(Store, Protocol):
    """A Store whose values may become others while they are read."""

    async def validator(self, key: str) -> Validator:
        """That of the value which is there now. NotFound; ReadError where the store cannot be asked."""
        ...

    async def get_same(self, key: str, validator: Validator, start: int = 0, length: int | None = None) -> Buffer:
        """As get(), of the value that `validator` is of; a ReadError where another one, or none, is there now.

        That is TargetChanged where it is sure, and validator() then tells the new one.
        """
        ...


Getter: TypeAlias = Callable[[int, int], Awaitable[Buffer]]  # (start, length) -> bytes of one value


async def one_version(store: Store, key: str, size: int) -> Getter:
    """Store.get() of `key`, with start and length, for who reads it in pieces: all are of the value that is there now.

    TargetChanged where that has not `size` bytes, which is what the store said of it before.
    """
    if store.immutable or not isinstance(store, ValidatedStore):  # which is slow to find out
        return functools.partial(store.get, key)
    validator = await store.validator(key)
    if validator.info.size != size:
        raise TargetChanged(key, f"has changed: it has {validator.info.size} bytes, and had {size}")
    return functools.partial(store.get_same, key, validator)


@runtime_checkable
class AdjustableStore(Store, Protocol):
    """A Store whose bounds on memory, disk and requests may change while it is open."""

    def adjust(self, options: Options) -> None:
        """Take over what may change of the options that it was opened with (daemon/live_options.py says what)."""
        ...


@runtime_checkable
class PrefetchStore(Store, Protocol):
    """A Store whose values may come over a network, so that it pays to ask for some before they are read."""

    @property
    def remote(self) -> bool:
        """Whether values came over a network so far: else nothing is to be gained."""
        ...

    async def get_ready(self) -> None:
        """Import and start what the first read over a network takes, if there are such values; asks no server."""
        ...

    async def prefetch(self, keys: Sequence[str]) -> None:
        """Bring values into the cache, of large ones the beginning; neighbours in one request.

        Returns when they are there; cancelling it drops what has not come and nobody reads. What cannot be
        had is left out: whoever reads it will hear why.
        """
        ...


@runtime_checkable
class PartialStore(Store, Protocol):
    """A Store that does not show all of another one."""

    async def left_out(self, key: str) -> dict[str, str]:
        """Why what lies at `key` and below it is not shown, by key; only what was looked at is known."""
        ...


class Reference(NamedTuple):
    """One file of a reference set: inline bytes, a range of a target, or all of a target."""

    key: str
    data: Buffer | None = None  # inline; then the rest says nothing
    url: str = ""  # as the set has it: perhaps relative
    offset: int = 0
    length: int | None = None  # bytes; None: all of the target


@runtime_checkable
class ReferenceStore(Store, Protocol):
    """A Store that knows itself as a reference set, which `zarrfs refs` writes in other forms."""

    def references(self) -> AsyncIterator[Reference]:
        """Every file, in the order of list_prefix(""). ReadError where part of the set cannot be had."""
        ...


def name_rule(name: str) -> str | None:
    """The rule that `name` breaks as one part of a key, or None."""
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
    """The rule that `key` breaks as the key of a file, or None."""
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
    """(parent prefix, name): "a/b/c" -> ("a/b", "c")."""
    parent, _, name = key.rpartition("/")
    return parent, name


def join_key(prefix: str, name: str) -> str:
    """The key of `name` in the directory `prefix`."""
    return f"{prefix}/{name}" if prefix else name


async def keys_below(store: Store, prefix: str) -> AsyncIterator[str]:
    """list_prefix() of a store by its list_dir(): holds one open listing a level."""
    levels = [(prefix, store.list_dir(prefix))]  # a stack of our own: trees may be deeper than Python's
    while levels:
        above, listing = levels[-1]
        async for info in listing:
            key = join_key(above, info.name)
            if info.kind is Kind.DIRECTORY:
                levels.append((key, store.list_dir(key)))
                break
            yield key
        else:
            levels.pop()
