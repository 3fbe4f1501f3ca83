"""-o view=netcdf: a group of any Zarr generation, with everything below it, as one NetCDF-4 file.

The file consists of a header, which libhdf5 writes when the file is first looked up (netcdf_header.py), and the chunks
of its arrays, which are decoded when they are read. It is named after the source. Its header is that of the documents
at the first lookup: a later version of the source is shown by a new view, which `zarrfs refresh` opens.
"""

from __future__ import annotations

import json
import operator
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from zarrfs.concurrency.tasks import for_each
from zarrfs.errors import NotDirectory, NotFound, ReadError
from zarrfs.store.api import Info, Kind, Store, check_key, name_rule
from zarrfs.system.processes import python
from zarrfs.views.hierarchy import Node
from zarrfs.views.view import File, Part, View, text_part

if TYPE_CHECKING:
    from zarrfs.views.netcdf_model import Description, Form  # imports numpy

SUFFIX = ".nc"
_NODES_MAX = 100_000  # nodes of a hierarchy
_LIMIT = 600.0  # seconds for one header
_ENDINGS = re.compile(r"(?<=.)(\.(gz|zst|bz2|xz|lz4|json|zip|zarr|parquet|parq|n5|refs|nc|h5))+$", re.IGNORECASE)

Build = Callable[[bytes, str], Awaitable[bytes]]


async def build_header(description: bytes, key: str) -> bytes:
    """Return the header for a description, made by a child process.

    Raise ReadError, with `key` as the name of the file, if the child process fails or takes more than 10 minutes.
    """
    with trio.move_on_after(_LIMIT):
        done = await trio.run_process(
            python("zarrfs.views.netcdf_header"), stdin=description, capture_stdout=True, capture_stderr=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise ReadError(key, f"its header cannot be made: {_reason(done)}")
        return bytes(done.stdout)
    raise ReadError(key, f"its header takes more than {_LIMIT:.0f} s")


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the last line of the child's standard error, or its exit status."""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the process ended with status {done.returncode}"


class NetCDFView(View):
    """A store of one NetCDF-4 file. Arrays that NetCDF cannot represent are left out with a warning."""

    name, in_chunks = "netcdf", True

    def __init__(self, store: Store, name: str, budget: int, build: Build = build_header) -> None:
        """`name`: of the file, without suffix; `budget`: bytes of decoded chunks to cache. `build` makes headers."""
        super().__init__(store, budget)
        self._name, self._build = name + SUFFIX, build
        self._making = trio.Lock()  # held by the task that makes the file
        self._made: File | None = None

    # -- the Store protocol

    async def find(self, key: str) -> File | Node:
        """Return the file, which the first caller makes. Raise NotFound and ReadError."""
        if not check_key(key, root=True):
            return Node("", None)
        if key != self._name:
            raise NotFound(key)
        if self._made is None:
            async with self._making:
                if self._made is None:
                    self._made = await self._make()
        return self._made

    async def list_dir(self, prefix: str, after: str = "") -> AsyncIterator[Info]:
        if prefix:
            raise NotDirectory(prefix) if prefix == self._name else NotFound(prefix)
        if self._name > after:  # no size before the first lookup: a header may take long
            yield Info(self._name, Kind.FILE, None) if self._made is None else self.entry(self._name, self._made)

    async def about(self) -> dict[str, Any]:
        """Return about() of the source; record the arrays that are left out."""
        await self._describe()
        return await self.lower.about()

    async def left_out(self, key: str) -> dict[str, str]:
        """Return why nodes are left out of the file, by path, once it was described."""
        return await super().left_out("")

    # -- the file

    async def _make(self) -> File:
        nodes, description = await self._describe()
        made = json.loads(await self._build(description.text, self._name))
        parts = [text_part(at, bytes.fromhex(text)) for at, text in made["texts"]]
        for at, one in zip(made["places"], description.variables, strict=True):
            if at is not None:
                parts.append(Part(at, at + one.nbytes, one.node, one.dtype))
        latest = max((node.mtime_ns for node in nodes if node.mtime_ns is not None), default=None)
        root = nodes[0]._replace(problem=None, mtime_ns=latest)
        return File(root, made["size"], tuple(sorted(parts, key=operator.itemgetter(0))))

    async def _describe(self) -> tuple[list[Node], Description]:
        """Read the documents and the arrays that are kept with the header. Raise ReadError."""
        from zarrfs.views.netcdf_inline import is_inlined, read_inlined
        from zarrfs.views.netcdf_model import describe

        nodes: list[Node] = []
        async for node in self.hierarchy.walk():
            if node.broken:
                self.check_document(node)
            nodes.append(node)
            if len(nodes) > _NODES_MAX:
                raise ReadError("/", f"view=netcdf: more than {_NODES_MAX:,} groups and arrays")
        inlined: dict[str, Form | str] = {}

        async def read(node: Node) -> None:
            inlined[node.path] = await read_inlined(self.lower, node, self.cache)

        await for_each(read, [node for node in nodes if is_inlined(node)])
        description = await trio.to_thread.run_sync(describe, nodes, inlined)
        for path, reason in description.left_out.items():
            self.leave_out(path, reason)
        return nodes, description


def name_of(source: str) -> str:
    """Return the name, without suffix, of the file that shows `source`: its last part without known endings."""
    name = source.split("::")[0].split("?")[0].rstrip("/").rpartition("/")[2]
    name = _ENDINGS.sub("", name)
    name = "".join("_" if char < " " or char == "\x7f" else char for char in name).strip(". ")
    return "data" if not name or name_rule(name + SUFFIX) else name
