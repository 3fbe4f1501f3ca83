"""Random trees for archives: models of trees, and a function that writes them to a directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.archives.compiled import Node
from zarrfs.store.api import Kind

BLOCK = 4096  # block size, in bytes, of the file systems that tests run on

_NAMES = st.sampled_from(["a", "b", "ab", "a-", "é", "日本", "x y", "n\nl", '"', ".h", "z" * 200])
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)
_TIMES = st.integers(-(2**31), 2**33).flatmap(lambda s: st.sampled_from([s * 10**9, s * 10**9 + 999_999_999]))
_PIECES = st.lists(
    st.tuples(
        st.integers(0, 60_000), st.binary(max_size=9) | st.text(max_size=9).map(str.encode) | st.just(b"x" * 9000)
    ), max_size=4,
)  # fmt: skip
_FILES = st.builds(
    lambda pieces, more, mode, time: File(pieces, more, mode, time),
    _PIECES, st.sampled_from([0, 0, 1, 5000, 300_000]), st.sampled_from([0o644, 0o4755, 0o2750, 0o1777, 0]), _TIMES,
)  # fmt: skip
_LINKS = st.sampled_from(["a", "../x", "/é", "b c", "n\nl", "x" * 4000])


class File(NamedTuple):
    """A regular file: (offset, data) to write, `more` bytes of hole at the end, permission bits, mtime in ns."""

    pieces: list[tuple[int, bytes]]
    more: int
    mode: int
    mtime_ns: int

    def data(self) -> bytes:
        found = bytearray()
        for at, data in self.pieces:
            found = found.ljust(at + len(data), b"\0") if data else found
            found[at : at + len(data)] = data
        return bytes(found) + bytes(self.more)

    def allocated(self) -> int:
        """Return the number of bytes in the blocks that were written to."""
        blocks = {at // BLOCK for start, data in self.pieces for at in range(start, start + len(data))}
        return sum(min(BLOCK, len(self.data()) - block * BLOCK) for block in blocks)


Directory = tuple[int, int]  # permission bits, mtime in ns
Model = dict[str, Any]  # by path: a File, a Directory, or the target of a symlink


def models() -> st.SearchStrategy[Model]:
    """Return a strategy for trees; every parent of an entry is a directory."""
    directories = st.tuples(st.sampled_from([0o755, 0o700, 0o2775, 0o1777]), _TIMES)
    entries = st.lists(st.tuples(_PATHS, st.one_of(_FILES, _LINKS, directories)), max_size=8)
    return st.tuples(entries, directories).map(lambda drawn: _model(*drawn))


def _model(entries: list[tuple[str, Any]], usual: Directory) -> Model:
    model: Model = {}
    for path, what in entries:
        above = ["/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)]
        if path not in model and all(isinstance(model.get(at, usual), tuple) and type(model.get(at)) is not File
                                     for at in above):  # fmt: skip
            for at in above:
                model.setdefault(at, usual)
            model[path] = what
    return model


def write(place: Path, model: Model) -> None:
    """Create the tree of a model in the directory `place`."""
    for path, what in model.items():
        at = place / path
        if isinstance(what, str):
            at.symlink_to(what)
        elif isinstance(what, File):
            with open(at, "wb") as file:
                for start, data in what.pieces:
                    os.pwrite(file.fileno(), data, start)
                os.truncate(file.fileno(), len(what.data()))
            os.chmod(at, what.mode)
            os.utime(at, ns=(0, what.mtime_ns))
        else:
            at.mkdir()
    for path in sorted(model, reverse=True):
        what = model[path]
        if not isinstance(what, File | str):
            os.chmod(place / path, what[0])
            os.utime(place / path, ns=(0, what[1]))


def expected(model: Model, path: str) -> tuple[Any, ...]:
    """Return (kind, mode, mtime_ns, data) as an archive must show them, times in whole seconds.

    A directory has no data; a symlink has only its kind and target.
    """
    what = model[path]
    if isinstance(what, str):
        return Kind.SYMLINK, what
    if isinstance(what, File):
        return Kind.FILE, what.mode, what.mtime_ns // 10**9 * 10**9, what.data()
    return Kind.DIRECTORY, what[0], what[1] // 10**9 * 10**9


def shown(node: Node) -> tuple[Any, ...]:
    """Return the tuple of expected() for a node that was read from an archive."""
    if node.kind is Kind.SYMLINK:
        return node.kind, node.data
    both = node.kind, node.mode, node.mtime_ns
    return (*both, node.data) if node.kind is Kind.FILE else both


def on_disk(place: Path) -> dict[str, tuple[Any, ...]]:
    """Return the tuples of expected() for all files below a directory on disk, by path."""
    found: dict[str, tuple[Any, ...]] = {}
    for at, directories, names in os.walk(place):
        for name in directories + names:
            path = os.path.join(at, name)
            status = os.lstat(path)
            key = os.path.relpath(path, place)
            both = stat.S_IMODE(status.st_mode), status.st_mtime_ns // 10**9 * 10**9
            if stat.S_ISLNK(status.st_mode):
                found[key] = Kind.SYMLINK, os.readlink(path)
            elif stat.S_ISDIR(status.st_mode):
                found[key] = Kind.DIRECTORY, *both
            else:
                found[key] = Kind.FILE, *both, Path(path).read_bytes()
    return found


def silent(text: str) -> None:
    """Fail on a warning."""
    raise AssertionError(text)
