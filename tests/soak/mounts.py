"""The mounts of a soak, their servers and sources: all bytes are computed from the seed."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kerchunk.df
import numpy as np
import zarr

from tests.conftest import run
from tests.faultproxy import FaultProxy, proxied
from tests.mounts.mounting import alive, daemon_pid, mount_lines
from tests.mounts.remotevalues import Value, cut, document, publish

MIB = 1 << 20
# Errors of a mount whose daemon was killed, and (ENOENT) of the empty directory below it until it is mounted again.
DEAD = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENOENT)
GRACE = 30.0  # seconds after the end of faults in which a read may still fail
STUCK = 120.0  # seconds after which an operation counts as hanging


class Mount:
    """One mount. `values` has the content of each file by key; `proxy`: its server may inject faults."""

    def __init__(
        self, directory: Path, name: str, source: Path, values: Mapping[str, bytes | memoryview], options: str = "ro",
        proxy: FaultProxy | None = None, mortal: bool = False, writable: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.source, self.values, self.options, self.proxy = name, source, values, options, proxy
        self.mortal, self.writable = mortal, writable  # mortal: disturbances may unmount or kill it
        self.keys = list(values)
        self.root, self.log = directory / "mnt" / name, directory / f"{name}.log"
        self.root.mkdir(parents=True)
        self.pid = self.ends = 0  # the latest daemon; how often a daemon was ended
        self.calm_since = 0.0
        self._changed, self._users, self._alone = threading.Condition(), 0, False

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the mount for one operation; wait while another thread has it alone()."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have the mount exclusively. Raise TimeoutError if its operations do not end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            ended = self._changed.wait_for(lambda: not self._users, STUCK)
        try:
            if not ended:
                raise TimeoutError(f"an operation hangs for {STUCK} s")
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def may_fail(self, code: int | None, ends: int) -> bool:
        """Return whether an operation that began after `ends` ends may have failed with `code`."""
        stormy = self.proxy is not None and (self.proxy.faults or time.monotonic() - self.calm_since < GRACE)
        return (code in DEAD and (ends != self.ends or not alive(self.pid))) or (code == errno.EIO and bool(stormy))

    def mount(self) -> None:
        done = run("mount", self.source, self.root, "-o", f"log_file={self.log}", "-o", self.options)
        if done.returncode:
            raise RuntimeError(f"mount: {done.stderr.strip()}")
        self.pid = daemon_pid(self.root)

    def unmount(self) -> None:
        """Unmount it, and wait for its daemon to exit; retry while the last requests of readers keep it in use."""
        deadline = time.monotonic() + STUCK
        while (done := run("umount", self.root)).returncode and "but its daemon" not in done.stderr:
            if "in use" not in done.stderr or time.monotonic() > deadline:
                raise RuntimeError(f"umount: {done.stderr.strip()}")
            time.sleep(0.1)
        self.ends += 1
        while alive(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        if mount_lines(self.root) or alive(self.pid):
            raise RuntimeError(f"umount has left a mount or its daemon {self.pid}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        while alive(self.pid):
            time.sleep(0.01)
        self.ends += 1


class World:
    """The mounts of one soak by name, not mounted yet; `model` is a plain directory for the changes to "overlay"."""

    def __init__(self, directory: Path, seed: int, www: Path, proxy: FaultProxy) -> None:
        self.directory, self.seed, self.proxy, self.model = directory, seed, proxy, directory / "model"
        self.mounts: dict[str, Mount] = {}
        self.model.mkdir()
        (directory / "upper").mkdir()
        small = cut(publish(www, "small.bin", 6 * MIB, seed), "small", 2000, gap=1000)
        large = cut(publish(www, "large.bin", 32 * MIB, seed), "large", 4 * MIB)
        remote = document(directory / "r.json", {f"{proxy.url}/small.bin": small, f"{proxy.url}/large.bin": large})
        patient = "memory_limit=16MiB,read_timeout=20s,retries=6"
        blocks = f"{patient},cache_dir={directory}/blocks,cache_size=12MiB"
        for name, options in ("refs", patient), ("shared1", blocks), ("shared2", blocks):
            self._add(name, remote, _values(small + large), options, proxy=proxy, mortal=name == "shared2")
        data = publish(directory / "data", "local.bin", 24 * MIB, seed)
        local = cut(data, "a/small", 1500, gap=5000) + cut(data, "b/large", 5 * MIB, gap=10)
        source = document(directory / "local.json", {f"file://{directory}/data/local.bin": local})
        self.change_local(0)
        self._add("local", source, _values(local))
        lower = Path(shutil.copy(source, directory / "lower.json"))  # a lower source must not change
        self._add("overlay", lower, _values(local), f"upperdir={directory}/upper", mortal=True, writable=True)
        self._add("archive", directory / "archive.json", self._archive(), f"blobs={directory}/blobs")
        store = directory / "array.zarr"
        items = np.random.default_rng(seed).integers(0, 1 << 30, (512, 2048)).astype("<i4")
        group = zarr.open_group(store, mode="w", zarr_format=2)
        group.create_array("x", shape=items.shape, chunks=(64, 256), dtype="<i4", compressors=None)[:] = items
        chunks = {f"x/{path.name}": path.read_bytes() for path in (store / "x").glob("[0-9]*")}
        refs: dict[str, Any] = {key: [f"file://{store}/{key}"] for key in chunks}
        refs |= {key: (store / key).read_text() for key in (".zgroup", "x/.zarray")}
        kerchunk.df.refs_to_dataframe(refs, str(directory / "array.parq"), record_size=50)
        self._add("parquet", directory / "array.parq", chunks, mortal=True)
        self._add("v3", store, chunks, "view=v3")
        np.save(file := io.BytesIO(), items)
        self._add("arrays", store, {"x.npy": file.getvalue()}, "view=arrays", mortal=True)

    def _add(self, name: str, *about: Any, **more: Any) -> None:
        self.mounts[name] = Mount(self.directory, name, *about, **more)

    def change_local(self, number: int) -> None:
        """Replace the set of "local" with one whose entry "version" is `number`."""
        found = json.loads((self.directory / "local.json").read_text())
        found["refs"]["version"] = str(number)
        (self.directory / "local.new").write_text(json.dumps(found))
        os.replace(self.directory / "local.new", self.directory / "local.json")

    def _archive(self) -> dict[str, bytes]:
        """Create an archive of files that are in the document, in blobs, and with holes; return its files."""
        chance, tree = random.Random(f"archive {self.seed}"), self.directory / "tree"
        for number in range(300):
            (tree / f"d{number % 17}").mkdir(parents=True, exist_ok=True)
            size = chance.choice((10, 900, 5000, 200_000))
            (tree / f"d{number % 17}/f{number}").write_bytes(chance.randbytes(size))
        with (tree / "sparse").open("wb") as file:
            file.truncate(3 * MIB)
            file.seek(MIB)
            file.write(chance.randbytes(5000))
        blobs, document = self.directory / "blobs", self.directory / "archive.json"
        done = run("archive", "create", "-C", tree, "-O", document, "--blobs", blobs, ".")
        if done.returncode:
            raise RuntimeError(f"zarrfs archive create: {done.stderr.strip()}")
        return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}

    def calm(self) -> None:
        """Stop injecting faults."""
        self.proxy.faults = {}
        for mount in self.mounts.values():
            mount.calm_since = time.monotonic()


def _values(found: list[Value]) -> dict[str, memoryview]:
    return {value.key: memoryview(value.data)[value.start : value.stop] for value in found}


@contextlib.contextmanager
def world(directory: Path, seed: int) -> Iterator[World]:
    """Start the servers and make the sources in `directory`; mount nothing."""
    for name in "www", "tmp":
        (directory / name).mkdir()
    os.environ |= {"XDG_CACHE_HOME": str(directory / "cache"), "TMPDIR": str(directory / "tmp")}
    with proxied(directory / "www", seed) as proxy:
        yield World(directory, seed, directory / "www", proxy)
