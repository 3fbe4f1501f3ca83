"""Sources of a soak: servers, documents and stores whose bytes are all computed from the seed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kerchunk.df
import numpy as np
import zarr

from tests.conftest import run
from tests.faultproxy import FaultProxy, proxied
from tests.mounts.remotevalues import Value, cut, document, publish
from tests.servers import Nginx, nginx_at
from tests.soak.places import Place, Weather

MIB = 1 << 20
SMALL = "memory_limit=16MiB"
PATIENT = "read_timeout=20s,retries=6"


class World:
    """The servers and the places (mounts) of one soak."""

    def __init__(self, directory: Path, seed: int, nginx: Nginx, proxy: FaultProxy) -> None:
        self.directory, self.seed, self.nginx, self.proxy = directory, seed, nginx, proxy
        self.weather = Weather()
        self.places: list[Place] = []
        self.upper = directory / "upper"
        self.model = directory / "model"
        self.upper.mkdir()
        self.model.mkdir()
        self._make()

    def place(self, name: str) -> Place:
        """Return the place called `name`."""
        return next(place for place in self.places if place.name == name)

    # -- the places and their sources

    def _make(self) -> None:
        remote = self._remote()
        blocks = f"cache_dir={self.directory / 'blocks'},cache_size=12MiB"
        self._add("refs", remote[0], remote[1], f"{PATIENT},{SMALL}", remote=True)
        for number in (1, 2):
            self._add(f"shared{number}", *remote, f"{PATIENT},{SMALL},{blocks}", remote=True, mortal=number == 2)
        local = self._local()
        self._add("local", *local)
        shutil.copy(local[0], self.directory / "lower.json")  # a lower source must not change
        lower = str(self.directory / "lower.json")
        self._add("overlay", lower, local[1], f"upperdir={self.upper}", mortal=True, writable=True)
        self._add("archive", *self._archive(), f"blobs={self.directory / 'blobs'}")
        array = self._array("array.zarr")
        self._add("parquet", *self._parquet(array), mortal=True)
        store = self.directory / "array.zarr"
        self._add("v3", str(store), {f"x/{name}": data for name, data in array.items()}, "view=v3")
        file = io.BytesIO()
        np.save(file, self._items())
        self._add("arrays", str(store), {"x.npy": file.getbuffer()}, "view=arrays", mortal=True)

    def _add(self, name: str, source: str, values: dict[str, memoryview], *options: str, **more: Any) -> None:
        self.places.append(Place(name, source, self.directory, options, values, self.weather, **more))

    def _remote(self) -> tuple[str, dict[str, memoryview]]:
        """Publish 2,097 values of 2,000 bytes and eight of 4 MiB behind the proxy."""
        small = cut(publish(self.nginx.plain.root, "small.bin", 6 * MIB, self.seed), "small", 2000, gap=1000)
        large = cut(publish(self.nginx.plain.root, "large.bin", 32 * MIB, self.seed), "large", 4 * MIB)
        targets = {f"{self.proxy.url}/small.bin": small, f"{self.proxy.url}/large.bin": large}
        return str(document(self.directory / "remote.json", targets)), _values(small + large)

    def change_local(self, number: int) -> None:
        """Replace the mounted local set with one whose entry "version" is `number`."""
        document = json.loads((self.directory / "local.json").read_text())
        document["refs"]["version"] = str(number)
        (self.directory / "local.new").write_text(json.dumps(document))
        os.replace(self.directory / "local.new", self.directory / "local.json")

    def _local(self) -> tuple[str, dict[str, memoryview]]:
        data = publish(self.directory / "data", "local.bin", 24 * MIB, self.seed)
        small, large = cut(data, "a/small", 1500, gap=5000), cut(data, "b/large", 5 * MIB, gap=10)
        targets = {f"file://{self.directory}/data/local.bin": small + large}
        source = str(document(self.directory / "local.json", targets))
        self.change_local(0)
        return source, _values(small + large)

    def _archive(self) -> tuple[str, dict[str, memoryview]]:
        """Create an archive of files that are in the document, in blobs, and with holes."""
        chance, tree = random.Random(f"archive {self.seed}"), self.directory / "tree"
        values: dict[str, memoryview] = {}
        for number in range(300):
            path = tree / f"d{number % 17}/f{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = chance.randbytes(chance.choice((10, 900, 5000, 200_000)))
            path.write_bytes(data)
            values[str(path.relative_to(tree))] = memoryview(data)
        with (tree / "sparse").open("wb") as file:
            file.truncate(3 * MIB)
            file.seek(MIB)
            file.write(data)
        values["sparse"] = memoryview((tree / "sparse").read_bytes())
        done = run("archive", "create", "-C", tree, "-O", self.directory / "archive.json", "--blobs",
                   self.directory / "blobs", ".")  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"zarrfs archive create: {done.stderr.strip()}")
        return str(self.directory / "archive.json"), values

    def _items(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.seed).integers(0, 1 << 30, (512, 2048)).astype("<i4")

    def _array(self, name: str) -> dict[str, memoryview]:
        """Create a Zarr v2 store with one uncompressed array; return its chunks by index."""
        group = zarr.open_group(self.directory / name, mode="w", zarr_format=2)
        items = self._items()
        group.create_array("x", shape=items.shape, chunks=(64, 256), dtype="<i4", compressors=None)[:] = items
        folder = self.directory / name / "x"
        return {path.name: memoryview(path.read_bytes()) for path in folder.iterdir() if path.name[0].isdigit()}

    def _parquet(self, array: dict[str, memoryview]) -> tuple[str, dict[str, memoryview]]:
        store = self.directory / "array.zarr"
        refs: dict[str, Any] = {f"x/{name}": [f"file://{store}/x/{name}"] for name in array}
        refs[".zgroup"] = (store / ".zgroup").read_text()
        refs["x/.zarray"] = (store / "x/.zarray").read_text()
        kerchunk.df.refs_to_dataframe(refs, str(self.directory / "array.parq"), record_size=50)
        return str(self.directory / "array.parq"), {f"x/{name}": data for name, data in array.items()}


def _values(found: list[Value]) -> dict[str, memoryview]:
    return {value.key: memoryview(value.data)[value.start : value.stop] for value in found}


def digest(data: memoryview) -> str:
    """Return the digest of bytes, as reader processes report it."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def world(directory: Path, seed: int) -> Iterator[World]:
    """Start the servers and make the sources in `directory`; mount nothing."""
    (directory / "nginx").mkdir()
    (directory / "www").mkdir()
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    os.environ["TMPDIR"] = str(directory / "tmp")
    (directory / "tmp").mkdir()
    with nginx_at(directory / "nginx", directory / "www") as nginx, proxied(nginx.plain.url, seed) as proxy:
        yield World(directory, seed, nginx, proxy)
