"""-o view=netcdf: a group of any Zarr generation, with everything below it, as one NetCDF-4 file.

The file consists of a header, which libhdf5 writes when the file is first looked up (netcdf_header.py), and the chunks
of its arrays, which are decoded when they are read. It is named after the source. Its header is that of the documents
at the first lookup: a later version of the source is shown by a new view, which `zarrfs refresh` opens.
"""

from __future__ import annotations

import bisect
import hashlib
import importlib
import logging
import operator
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import IsDirectory, NotDirectory, NotFound, ReadError, TargetChanged
from zarrfs.store.api import Info, Kind, Store, Value, check_key, name_rule
from zarrfs.system.buffers import Buffer
from zarrfs.views import netcdf_header
from zarrfs.views.flat_arrays import DecodedView, FlatArrays
from zarrfs.views.hierarchy import Hierarchy, Node
from zarrfs.zarr.errors import MetadataError

if TYPE_CHECKING:
    from zarrfs.views.netcdf_inline import Inlined
    from zarrfs.views.netcdf_model import Description, Variable  # imports numpy

log = logging.getLogger(__name__)

SUFFIX = ".nc"
_FRESH = 1.0  # seconds for which the document of an array of a mutable store is not looked at again
_NODES_MAX = 100_000  # nodes of a hierarchy
_ENDINGS = (
    ".gz", ".zst", ".bz2", ".xz", ".lz4", ".json", ".zip", ".zarr", ".parquet", ".parq", ".n5", ".refs", ".nc", ".h5",
)  # fmt: skip

Build = Callable[[bytes, str], Awaitable[bytes]]


class _File(NamedTuple):
    """The file of the view: its header, and the variables whose chunks follow it."""

    info: Info
    parts: tuple[tuple[int, bytes], ...]  # (address, bytes), sorted
    starts: list[int]  # addresses of the chunks of variables, sorted
    shown: list[tuple[int, Variable]]  # (end address, variable) for each of `starts`
    content: str  # a digest of all that is not read from chunks


class NetCDFView(DecodedView):
    """A store of one NetCDF-4 file. Arrays that NetCDF cannot represent are left out with a warning."""

    def __init__(self, store: Store, name: str, budget: int, build: Build = netcdf_header.build) -> None:
        """`name`: of the file, without suffix; `budget`: bytes of decoded chunks to cache. `build` makes headers."""
        super().__init__(store, FlatArrays(store, budget, in_chunks=True))
        self._name, self._build = name + SUFFIX, build
        self._hierarchy = Hierarchy(store)
        self._making = trio.Lock()  # held by the task that makes the file
        self._made: _File | None = None
        self._left_out: dict[str, str] = {}

    # -- the Store protocol

    async def info(self, key: str, sized: bool = True) -> Info:
        if not key:
            return Info("", Kind.DIRECTORY)
        self._check(key)
        return (await self._file()).info

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        if prefix:
            self._check(prefix)
            raise NotDirectory(prefix)
        if self._name > after:  # no size before the first lookup: a header may take long
            yield Info(self._name, Kind.FILE, None) if self._made is None else self._made.info

    async def open(self, key: str) -> Value:
        if not key:
            raise IsDirectory(key)
        self._check(key)
        hierarchy = None if self.immutable else self._hierarchy
        return _NetCDFValue(self._arrays, hierarchy, key, await self._file())

    async def locate(self, key: str, shown: bool = True) -> dict[str, Any]:
        if not key:
            return {}
        self._check(key)
        file = await self._file()
        return {"variables in chunks": len(file.starts), "header": sum(len(data) for _, data in file.parts)}

    async def about(self) -> dict[str, Any]:
        """Return about() of the source; record the arrays that are left out."""
        await self._describe()
        return await self.lower.about()

    async def get_ready(self) -> None:
        await trio.to_thread.run_sync(importlib.import_module, "zarrfs.views.netcdf_model")
        await super().get_ready()

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why nodes are left out of the file, by path, once it was described."""
        return self._left_out

    # -- the file

    def _check(self, key: str) -> None:
        """Raise NotFound unless `key` is the file."""
        if check_key(key) != self._name:
            raise NotFound(key)

    async def _file(self) -> _File:
        """Return the file, which the first caller makes. Raise ReadError."""
        if self._made is None:
            async with self._making:
                if self._made is None:
                    self._made = await self._make()
        return self._made

    async def _make(self) -> _File:
        nodes, description = await self._describe()
        try:
            header = netcdf_header.unpack(await self._build(description.text, self._name))
        except (ValueError, KeyError, TypeError) as exc:
            raise ReadError(self._name, f"its header cannot be made: {exc}") from exc
        placed = zip(header.places, description.variables, strict=True)
        late = sorted((at, at + one.nbytes, one) for at, one in placed if at is not None)
        content = hashlib.sha256(description.text)
        info = Info(
            self._name, Kind.FILE, header.size, nodes[0].mode,
            max((node.mtime_ns for node in nodes if node.mtime_ns is not None), default=None),
            identity=None if self.immutable else int.from_bytes(content.digest()[:7]),
        )  # fmt: skip
        starts, shown = [start for start, _, _ in late], [(stop, variable) for _, stop, variable in late]
        return _File(info, header.parts, starts, shown, content.hexdigest())

    async def _describe(self) -> tuple[list[Node], Description]:
        """Read the documents and the arrays that are kept with the header. Raise ReadError."""
        from zarrfs.views.netcdf_inline import is_inlined, read_inlined

        nodes: list[Node] = []
        async for node in self._hierarchy.walk(links=True):
            nodes.append(node)
            if len(nodes) > _NODES_MAX:
                raise ReadError("/", f"view=netcdf: more than {_NODES_MAX:,} groups and arrays")
        inlined: dict[str, Inlined | str] = {}

        async def read(node: Node) -> None:
            inlined[node.path] = await read_inlined(self.lower, node, self._arrays.cache)

        await for_each(read, [node for node in nodes if is_inlined(node)])
        description = await trio.to_thread.run_sync(_described, self._name, nodes, inlined)
        for path, reason in description.left_out.items():
            if self._left_out.get(path) != reason:
                log.warning("%s: left out of view=netcdf: %s", path or "/", reason)
        self._left_out = description.left_out
        return nodes, description


class _NetCDFValue(Value):
    """The open file of the view. Its header is pinned; its chunks are looked up at every read, as in ArraysView."""

    __slots__ = ("_arrays", "_checked", "_file", "_hierarchy", "_key")

    def __init__(self, arrays: FlatArrays, hierarchy: Hierarchy | None, key: str, file: _File) -> None:
        """`hierarchy`: for checks of documents; None if arrays cannot change."""
        super().__init__(file.info, file.content if hierarchy is None else None)
        self._arrays, self._hierarchy, self._key, self._file = arrays, hierarchy, key, file
        self._checked: dict[str, float] = {}  # when the document of an array was last looked at, by path

    async def read(self, start: int, length: int) -> Buffer:
        file, stop = self._file, min(start + length, self.size)
        if start >= stop:
            return b""
        at = max(bisect.bisect_right(file.starts, start) - 1, 0)
        if at < len(file.starts) and file.starts[at] <= start and stop <= file.shown[at][0]:
            return await self._items(file.shown[at][1], start - file.starts[at], stop - file.starts[at])
        out = bytearray(stop - start)  # the file has holes between the header's parts and the variables
        first_part = max(bisect.bisect_right(file.parts, start, key=operator.itemgetter(0)) - 1, 0)
        for address, data in file.parts[first_part:]:
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
        await self._check(variable.node)
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

    async def _check(self, node: Node) -> None:
        """Look at the document of an array once a second. Raise TargetChanged if it is not that of the header."""
        now = trio.current_time()
        if self._hierarchy is None or now - self._checked.get(node.path, -_FRESH) < _FRESH:
            return
        if await self._hierarchy.node(node.path) != node:
            rule = f"{node.path or '/'} has changed since the file was first looked up: refresh the mount"
            raise TargetChanged(self._key, rule)
        self._checked[node.path] = now


def _described(key: str, nodes: list[Node], inlined: dict[str, Inlined | str]) -> Description:
    """Return the description of the file. To be called in a thread, because it imports numpy."""
    from zarrfs.views.netcdf_model import describe

    try:
        return describe(nodes, inlined)
    except MetadataError as exc:
        raise ReadError(key, str(exc)) from exc


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
