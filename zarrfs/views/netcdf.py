"""-o view=netcdf: groups of any Zarr generation as NetCDF-4 files.

A file consists of a header, which libhdf5 writes when the file is first looked up (netcdf_header.py), and the items of
its arrays, which are decoded when they are read. The root group with everything below it is one file, named after the
source; with -o netcdf=groups each group is a file of its own arrays, beside a directory with the files of the groups
below it.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import importlib
import logging
import operator
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, TargetChanged
from zarrfs.store.api import (
    Info,
    Kind,
    LatestVersions,
    Store,
    Value,
    check_key,
    join_key,
    keys_below,
    name_rule,
    split_key,
)
from zarrfs.system.buffers import Buffer
from zarrfs.views import netcdf_header
from zarrfs.views.flat_arrays import DecodedView, FlatArrays
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.views.netcdf_header import Header
from zarrfs.zarr.errors import MetadataError
from zarrfs.zarr.model import ArrayMetadata

if TYPE_CHECKING:
    from zarrfs.views.netcdf_model import Description, Variable  # imports numpy
    from zarrfs.views.netcdf_texts import TextArray, Texts

log = logging.getLogger(__name__)

SUFFIX = ".nc"
_FRESH = 1.0  # seconds for which the documents of a mutable store are not looked at again
_PAUSE = 10.0  # or for as many times the duration of the last look at them, if that is longer
_LOOKED_AT = 2048  # chunks to check for changes when a file is opened
_NODES_MAX = 100_000  # nodes of a hierarchy
_JSON = {"json", "json2"}  # codecs of arrays of objects, which may all be text, as kerchunk writes it
_WALK = "//"  # the key in LatestVersions for the whole hierarchy
_ENDINGS = (
    ".gz", ".zst", ".bz2", ".xz", ".lz4", ".json", ".zip", ".zarr", ".parquet", ".parq", ".n5", ".refs", ".nc", ".h5",
)  # fmt: skip

Build = Callable[[bytes, str], Awaitable[bytes]]


class KeptHeaders(Protocol):
    """A store of headers that outlives mounts."""

    def header(self, digest: str) -> bytes | None:
        """Return the header kept for `digest`; None if it is missing or damaged."""
        ...

    def keep_header(self, digest: str, data: bytes) -> None:
        """Keep a header for `digest`."""
        ...


class _FileTexts:
    """The arrays of text of any length in a file, as they were read when it was described."""

    def __init__(self) -> None:
        self.items: dict[str, Texts | str] = {}  # by path; or the reason why an array is left out
        self._arrays: list[TextArray] = []
        self._looked = trio.current_time()
        self._changed = False

    async def read(self, path: str, make: Callable[[], TextArray]) -> None:
        """Read an array, or record why it cannot be shown. Raise ReadError as TextArray.read() does."""
        try:
            array = make()
            self._arrays.append(array)
            self.items[path] = await array.read()
        except MetadataError as exc:
            self.items[path] = str(exc)

    async def changed(self) -> bool:
        """Return whether chunks have changed since they were read."""
        now = trio.current_time()
        if self._arrays and not self._changed and now - self._looked >= _FRESH:
            self._looked = now
            for array in self._arrays:
                self._changed = self._changed or not await array.unchanged()
        return self._changed


class _File(NamedTuple):
    """One version of a file of the view, with its header."""

    name: str
    root: str  # the group that it shows
    nodes: list[Node]
    description: Description
    digest: str  # of the description
    content: str  # a digest of the parts that are not decoded from chunks when they are read
    texts: _FileTexts
    header: Header
    starts: list[int]  # addresses of the variables that have bytes, sorted
    shown: list[tuple[int, Variable]]  # (end address, variable) for each of `starts`
    mtime_ns: int | None
    mode: int | None


class _Tree(NamedTuple):
    """The files and directories of the view, which follow from the documents."""

    nodes: tuple[Node, ...]
    files: dict[str, tuple[str, list[Node]]]  # (path of its group, its nodes) of each file
    directories: dict[str, dict[str, bool]]  # names in each directory, and whether they are directories


class NetCDFView(DecodedView):
    """A store of NetCDF-4 files. Arrays that NetCDF cannot represent are left out with a warning."""

    def __init__(
        self, store: Store, name: str, groups: bool, budget: int, strict: bool = False,
        kept: KeptHeaders | None = None, build: Build = netcdf_header.build, several: bool = False,
    ) -> None:  # fmt: skip
        """`name`: of the root group's file, without suffix; `groups`: a file for each group; `budget`: as ArraysView.

        `strict`: raise ReadError when a file from which an array would be left out is looked up. `build` makes
        headers. `several`: other processes show the same files; listings then have sizes, because another process
        might answer a later request for a size.
        """
        super().__init__(store, FlatArrays(store, budget, c_order=True))
        self._name, self._groups, self._strict = name, groups, strict
        self._hierarchy = Hierarchy(store)
        self._kept, self._build, self._several = kept, build, several
        self._lock = trio.Lock()  # around the tree and the headers
        self._tree: tuple[float, _Tree, Hashable] | None = None  # (time of next walk, tree, seen())
        self._latest: LatestVersions | None = None  # shared by the processes of the mount, if there are several
        self._files: dict[str, _File] = {}
        self._reasons: dict[str, dict[str, str]] = {}  # why nodes are left out, by file and path

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        if not key:
            return Info("", Kind.DIRECTORY)
        tree = await self._walked(key)
        if key in tree.directories:
            return Info(split_key(key)[1], Kind.DIRECTORY)
        if key not in tree.files:
            raise NotFound(check_key(key))
        return self._info(await self._file(key))

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        tree = await self._walked(prefix)
        if prefix in tree.files:
            raise NotDirectory(prefix)
        if prefix not in tree.directories:
            raise NotFound(prefix)
        for name, is_directory in sorted(tree.directories[prefix].items()):
            if name > after:
                if is_directory:
                    yield Info(name, Kind.DIRECTORY)
                else:
                    yield await self._listed(join_key(prefix, name), tree)

    async def open(self, key: str) -> Value:
        tree = await self._walked(key)
        if key in tree.directories:
            raise IsDirectory(key)
        if key not in tree.files:
            raise NotFound(check_key(key))
        file = await self._file(key)
        info = self._info(file)
        # several processes cannot share a version, because each notices only changes of the chunks that it has read
        known = self.immutable or (info.mtime_ns is not None and not self._several)
        edition = sum(self._arrays.edition(one.node) for one in file.description.variables)
        version = (file.content, info.mtime_ns, edition) if known else None
        return _NetCDFValue(self._arrays, None if self.immutable else self._hierarchy, key, file, info, version)

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        tree = await self._walked(key)
        if key not in tree.files:
            await self.info(key)
            return {}
        file = await self._file(key)
        header = sum(len(data) for _, data in file.header.parts)
        return {"group": file.root or "/", "variables": len(file.description.variables), "header": header}

    async def about(self) -> dict[str, Any]:
        """Return about() of the source and the number of files; record the arrays that are left out of them."""
        tree = await self._walked("")
        for key, (root, nodes) in tree.files.items():
            texts = await self._texts(nodes)
            description = await trio.to_thread.run_sync(_described, key, nodes, root, texts.items)
            self._leave_out(key, description.left_out)
        return await self.lower.about() | {"files": len(tree.files)}

    async def get_ready(self) -> None:
        await trio.to_thread.run_sync(importlib.import_module, "zarrfs.views.netcdf_model")
        await super().get_ready()

    def share_latest_versions(self, latest: LatestVersions) -> None:
        self._latest = self._hierarchy.latest = self._arrays.cache.latest = latest

    # -- left out arrays

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why nodes are left out of the file `key`, or of the files below the directory `key`, by path.

        Only files that were described so far are included.
        """
        below = f"{key}/" if key else ""
        return {
            path: why for file, reasons in self._reasons.items()
            if file == key or file.startswith(below) for path, why in reasons.items()
        }  # fmt: skip

    async def check(self) -> None:
        async for key in keys_below(self, ""):
            await self.info(key)
        if self._strict:
            _refuse(await self.left_out(""))

    # -- the files of the view

    async def _walked(self, key: str) -> _Tree:
        """Return the tree of files, walking the hierarchy again if it is outdated.

        Before a walk, raises InvalidKey if `key` is invalid.
        """
        known = self._tree
        if known is None or not (self.immutable or self._is_fresh(known[0], known[2])):
            check_key(key, root=True)
            async with self._lock:
                if self._tree is known:
                    began, latest = trio.current_time(), self._latest
                    begun = 0 if latest is None else latest.begin(_WALK)
                    tree = await self._walk()
                    seen = None if latest is None else self._hierarchy.seen(tree.nodes)
                    if latest is not None:
                        latest.ended(_WALK, seen, begun)
                    if known is not None and _same(known[1].nodes, tree.nodes):
                        tree = known[1]
                    now = trio.current_time()
                    self._tree = now + max(_FRESH, _PAUSE * (now - began)), tree, seen
        assert self._tree is not None
        return self._tree[1]

    def _is_fresh(self, until: float, seen: Hashable) -> bool:
        return trio.current_time() < until and (self._latest is None or self._latest.holds(_WALK, seen))

    async def _walk(self) -> _Tree:
        nodes: list[Node] = []
        async for node in self._hierarchy.walk(links=True):
            nodes.append(node)
            if len(nodes) > _NODES_MAX:
                raise ReadError("/", f"view=netcdf: more than {_NODES_MAX:,} groups and arrays")
        directories: dict[str, dict[str, bool]] = {"": {}}
        if not self._groups:
            directories[""][self._name + SUFFIX] = False
            return _Tree(tuple(nodes), {self._name + SUFFIX: ("", nodes)}, directories)
        return _Tree(tuple(nodes), self._by_group(nodes, directories), directories)

    def _by_group(
        self, nodes: list[Node], directories: dict[str, dict[str, bool]]
    ) -> dict[str, tuple[str, list[Node]]]:
        """Return the files with -o netcdf=groups; fill `directories`."""
        members: dict[str, list[Node]] = {}
        for node in nodes:
            at = node.path if not node.leaf or not node.path else split_key(node.path)[0]
            members.setdefault(at, []).append(node)
        for path in members:  # directories have the names of their groups
            above, name = split_key(path)
            while above:
                directories.setdefault(split_key(above)[0], {})[split_key(above)[1]] = True
                directories.setdefault(above, {})
                above = split_key(above)[0]
        files: dict[str, tuple[str, list[Node]]] = {}
        for path, own in members.items():
            first, attributes = own[0], own[0].metadata.attributes if own[0].metadata else {}
            if len(own) == 1 and not first.leaf and first.problem is None and not attributes:
                continue  # a group that holds only groups needs no file
            above, name = split_key(path)
            name = (name if path else self._name) + SUFFIX
            siblings = directories.setdefault(above, {})
            while name in siblings and not name_rule(name):
                name = "_" + name
            if name_rule(name):
                self._note_left_out(join_key(above, name), {path: f"{SUFFIX}: {name_rule(name)}"})
                continue
            siblings[name] = False
            files[join_key(above, name)] = path, own
        return files

    # -- one file

    async def _file(self, key: str) -> _File:
        """Return a file with its header, which is made if it is missing, or if documents or texts have changed."""
        async with self._lock:
            assert self._tree is not None
            root, nodes = self._tree[1].files.get(key, ("", None))
            if nodes is None:
                raise NotFound(key)
            known = self._files.get(key)
            if known is None or known.nodes is not nodes or (not self.immutable and await known.texts.changed()):
                known = self._files[key] = await self._made(key, root, nodes, known)
        if not self.immutable:
            await self._look_at_chunks(known)
        return known

    async def _listed(self, key: str, tree: _Tree) -> Info:
        """Return the entry of a file in a listing, perhaps without size: making a header for each would take long."""
        file = self._files.get(key)
        if file is not None and file.nodes is not tree.files[key][1]:
            file = None  # made from earlier documents
        if file is None and self._several:
            with contextlib.suppress(ReadError, NotFound):  # a client that looks at the file gets the error
                file = await self._file(key)
        return Info(split_key(key)[1], Kind.FILE, None) if file is None else self._info(file)

    async def _look_at_chunks(self, file: _File) -> None:
        """Check a bounded number of chunks for changes, beginning with the arrays that were checked longest ago."""
        looked = 0
        for node in sorted((one.node for one in file.description.variables), key=self._arrays.last_look):
            looked += await self._arrays.look_at_chunks(node)
            if looked >= _LOOKED_AT:
                break

    async def _made(self, key: str, root: str, nodes: list[Node], old: _File | None) -> _File:
        texts = await self._texts(nodes)
        description = await trio.to_thread.run_sync(_described, key, nodes, root, texts.items)
        self._leave_out(key, description.left_out)
        digest = hashlib.sha256(description.text + netcdf_header.libraries()).hexdigest()
        if old is not None and old.digest == digest:
            header = old.header
        else:
            header = await self._header(key, digest, description)
        places = sorted(
            (place[0], place[0] + place[1], variable)
            for place, variable in zip(header.places, description.variables, strict=True) if place is not None
        )  # fmt: skip
        mtimes = [node.mtime_ns for node in nodes if node.mtime_ns is not None]
        if mtimes and old is not None and old.texts.items != texts.items:
            mtimes.append(time.time_ns())
        data = [one.texts.data for one in description.variables if one.texts is not None]
        content = hashlib.sha256(b"".join([digest.encode(), *data])).hexdigest()
        return _File(
            split_key(key)[1], root, nodes, description, digest, content, texts, header,
            [start for start, _, _ in places], [(stop, variable) for _, stop, variable in places],
            max(mtimes, default=None), nodes[0].mode,
        )  # fmt: skip

    async def _texts(self, nodes: list[Node]) -> _FileTexts:
        """Read the arrays of text of any length among `nodes`."""
        found = _FileTexts()
        arrays = [node for node in nodes if _is_text(node)]
        if arrays:
            texts = await trio.to_thread.run_sync(importlib.import_module, "zarrfs.views.netcdf_texts")
            for node in arrays:
                make = functools.partial(texts.TextArray, self.lower, node, self._arrays.cache)
                await found.read(node.path, make)
        return found

    async def _header(self, key: str, digest: str, description: Description) -> Header:
        """Return the kept header for a description, or make one. Raise ReadError if it cannot be made."""
        if self._kept is not None:
            data = await trio.to_thread.run_sync(self._kept.header, digest)
            if data is not None:
                return netcdf_header.unpack(data)
        data = await self._build(description.text, key)
        try:
            header = netcdf_header.unpack(data)
        except (ValueError, KeyError, TypeError) as exc:
            raise ReadError(key, f"its header cannot be made: {exc}") from exc
        for place, variable in zip(header.places, description.variables, strict=True):
            if (0 if place is None else place[1]) != variable.nbytes:
                raise ReadError(key, f"its header has {place} for {variable.nbytes} bytes of {variable.node.path}")
        if self._kept is not None:
            await trio.to_thread.run_sync(self._kept.keep_header, digest, data)
        return header

    def _leave_out(self, key: str, reasons: dict[str, str]) -> None:
        if self._strict:
            _refuse(reasons)
        self._note_left_out(key, reasons)

    def _note_left_out(self, key: str, reasons: dict[str, str]) -> None:
        before = self._reasons.get(key, {})
        for path, reason in reasons.items():
            if before.get(path) != reason:
                log.warning("%s: left out of view=netcdf: %s", path or "/", reason)
        self._reasons[key] = reasons

    def _info(self, file: _File) -> Info:
        mtime = file.mtime_ns
        if mtime is not None and not self.immutable:
            mtime = max(mtime, *(self._arrays.changed(one.node) for one in file.description.variables), 0)
        identity = None if self.immutable else int(file.content[:15], 16)  # another layout must not share cached pages
        return Info(file.name, Kind.FILE, file.header.size, file.mode, mtime, identity=identity)


class _NetCDFValue(Value):
    """An open file of the view. Its header is pinned; its chunks are looked up at every read, as in ArraysView."""

    __slots__ = ("_arrays", "_checked", "_file", "_hierarchy", "_key", "_lock")

    def __init__(
        self, arrays: FlatArrays, hierarchy: Hierarchy | None, key: str, file: _File, info: Info,
        version: Hashable | None,
    ) -> None:  # fmt: skip
        """`hierarchy`: for checks of documents; None if arrays cannot change."""
        super().__init__(info, version)
        self._arrays, self._hierarchy, self._key, self._file = arrays, hierarchy, key, file
        self._checked: dict[str, float] = {}  # when the document of an array was last looked at, by path
        self._lock = trio.Lock()

    @property
    def pinned(self) -> Hashable:
        return self._file.content

    async def read(self, start: int, length: int) -> Buffer:
        file, stop = self._file, min(start + length, self.size)
        if start >= stop:
            return b""
        at = max(bisect.bisect_right(file.starts, start) - 1, 0)
        if at < len(file.starts) and file.starts[at] <= start and stop <= file.shown[at][0]:
            return await self._items(file.shown[at][1], start - file.starts[at], stop - file.starts[at])
        out = bytearray(stop - start)  # the file has holes between the header's parts and the variables
        parts = file.header.parts
        for index in range(max(bisect.bisect_right(parts, start, key=operator.itemgetter(0)) - 1, 0), len(parts)):
            address, data = parts[index]
            if address >= stop:
                break
            first, last = max(address, start), min(address + len(data), stop)
            if first < last:
                out[first - start : last - start] = data[first - address : last - address]
        for begin, (end, variable) in zip(file.starts[at:], file.shown[at:], strict=True):
            if begin >= stop:
                break
            first, last = max(begin, start), min(end, stop)
            if first < last:
                out[first - start : last - start] = await self._items(variable, first - begin, last - begin)
        return out

    async def _items(self, variable: Variable, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of a variable. Raise ReadError, and TargetChanged as _check() does."""
        if variable.texts is not None:
            if variable.texts.damage is not None:
                raise ReadError(variable.texts.damage.where, variable.texts.damage.reason)
            return memoryview(variable.texts.data)[start:stop]
        if self._hierarchy is not None and not self._is_checked(self._hierarchy, variable.node):
            async with self._lock:
                await self._check(self._hierarchy, variable.node)
        flat, form = self._arrays.reader(variable.node), variable.form
        if form.convert is None:
            return await flat.read(start, stop)
        import numpy as np

        first, last = start // form.itemsize, -(-stop // form.itemsize)
        stored = flat.chunks.itemsize
        items = np.frombuffer(await flat.read(first * stored, last * stored), flat.chunks.array.dtype.numpy())
        try:
            data = form.convert(items)
        except ReadError as exc:
            raise ReadError(variable.node.path, exc.reason) from None
        shown = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        return shown[start - first * form.itemsize : stop - first * form.itemsize]

    def _is_checked(self, hierarchy: Hierarchy, node: Node) -> bool:
        checked = self._checked.get(node.path, -_FRESH)
        return trio.current_time() - checked < _FRESH and hierarchy.is_fresh(node)

    async def _check(self, hierarchy: Hierarchy, node: Node) -> None:
        """Look at the document of an array again.

        Raise TargetChanged if its chunks are now found or decoded in another way, or may have been removed.
        """
        if self._is_checked(hierarchy, node):
            return
        now = await hierarchy.node(node.path)
        if now is not node and (_decoding(now) != _decoding(node) or _has_shrunk(now, node)):
            raise TargetChanged(self._key, f"{node.path or '/'} has changed since the file was opened")
        self._checked[node.path] = trio.current_time()


def _is_text(node: Node) -> bool:
    """Return whether a node is an array of text or bytes of any length, or of objects that may be text."""
    array = node.metadata
    if not isinstance(array, ArrayMetadata) or array.dtype.itemsize:
        return False
    return array.dtype.kind in "TB" or any(codec.name.rpartition(".")[2] in _JSON for codec in array.codecs)


def _refuse(reasons: dict[str, str]) -> None:
    """Raise ReadError for the first node that is left out, if there is one."""
    for path, reason in reasons.items():
        raise ReadError(path or "/", f"view=netcdf cannot show it: {reason}")


def _decoding(node: Node | None) -> tuple[object, ...] | None:
    """Return the properties by which chunks of an array are found and decoded, without its shape and attributes."""
    array = None if node is None else node.metadata
    if node is None or not isinstance(array, ArrayMetadata):
        return None
    return node.chunks, array.grid.chunks, array.dtype, array.fill, array.codecs, array.keys


def _has_shrunk(now: Node | None, node: Node) -> bool:
    """Return whether an array is smaller than before: lost chunks would read as fill values."""
    new, old = None if now is None else now.metadata, node.metadata
    if not isinstance(new, ArrayMetadata) or not isinstance(old, ArrayMetadata):
        return True
    return any(extent < before for extent, before in zip(new.shape, old.shape, strict=True))


def _described(key: str, nodes: list[Node], root: str, texts: dict[str, Texts | str]) -> Description:
    """Return the description of a file. To be called in a thread, because it imports numpy."""
    from zarrfs.views.netcdf_model import describe

    try:
        return describe(nodes, root, texts)
    except MetadataError as exc:
        raise ReadError(key, str(exc)) from exc


def _same(nodes: Sequence[Node], others: Sequence[Node]) -> bool:
    """Return whether two walks found the same Node objects, so that no document was read again between them."""
    return len(nodes) == len(others) and all(a is b for a, b in zip(nodes, others, strict=True))


def name_of(source: str) -> str:
    """Return the name, without suffix, of the file that shows `source`: its last part without known endings."""
    name = source.split("::")[0].split("?")[0].rstrip("/").rpartition("/")[2]
    stripped = True
    while stripped:
        stripped = False
        for ending in _ENDINGS:
            if name.lower().endswith(ending) and len(name) > len(ending):
                name, stripped = name[: -len(ending)], True
    name = "".join("_" if char < " " or char == "\x7f" else char for char in name).strip(". ")
    return "data" if not name or name_rule(name + SUFFIX) else name
