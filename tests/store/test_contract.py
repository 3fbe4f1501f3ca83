"""The contract tests run for each store: file system, index, and fsspec over memory, file, zip, HTTP and S3."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest

from tests.servers import S3, Nginx
from tests.store.contract import StoreContract, Tree, WritableContract
from zarrfs.config.options import Options
from zarrfs.store.directory import FileSystemStore
from zarrfs.store.index import IndexStore
from zarrfs.store.indexfile import IndexWriter
from zarrfs.store.remote import FsspecStore
from zarrfs.store.targets import Targets

_numbers = itertools.count()


def write(root: Path, tree: Tree) -> Path:
    """Write a model as files into a new directory below `root`."""
    base = root / f"tree{next(_numbers)}"
    for key, value in tree.items():
        path = base / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)
    base.mkdir(exist_ok=True)
    return base


@pytest.fixture(autouse=True, scope="class")
def _place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    if request.cls is not None:
        request.cls.place = tmp_path_factory.mktemp("trees")


class TestFileSystem(WritableContract):
    place: Path

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[FileSystemStore]:
        store = FileSystemStore(str(write(self.place, tree)))
        yield store
        await store.aclose()


class TestFileSystemWithoutOpenat2(TestFileSystem):
    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[FileSystemStore]:
        store = FileSystemStore(str(write(self.place, tree)))
        store._base._kernel_walks = False
        yield store
        await store.aclose()


class TestIndex(StoreContract):
    place: Path

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[IndexStore]:
        path = str(self.place / f"{next(_numbers)}.index")
        with IndexWriter(path) as writer:
            for key, value in tree.items():
                writer.inline(key, value)
            writer.commit()
        store = IndexStore(path, Targets(Options()))
        yield store
        await store.aclose()


class RemoteContract(StoreContract):
    """The contract of an FsspecStore."""

    options: ClassVar[Options] = Options(retries=0)
    place: Path

    def url(self, tree: Tree) -> str:
        """Write `tree` to a new place; return its URL."""
        raise NotImplementedError

    @asynccontextmanager
    async def open(self, tree: Tree) -> AsyncIterator[FsspecStore]:
        store = FsspecStore(self.url(tree), self.options)
        yield store
        await store.aclose()


class TestMemory(RemoteContract):
    def url(self, tree: Tree) -> str:
        name = f"tree{next(_numbers)}"
        fsspec.filesystem("memory").pipe({f"/{name}/{key}": value for key, value in tree.items()})
        return f"memory://{name}"


class TestZip(RemoteContract):
    compression: ClassVar[int] = zipfile.ZIP_STORED
    prefix: ClassVar[str] = "in/side/"

    def zip(self, directory: Path, tree: Tree) -> Path:
        path = directory / f"{next(_numbers)}.zip"
        with zipfile.ZipFile(path, "w", self.compression) as archive:
            for key, value in tree.items():
                archive.writestr(zipfile.ZipInfo(self.prefix + key), value, self.compression)
        return path

    def url(self, tree: Tree) -> str:
        return f"zip://{self.prefix.rstrip('/')}::file://{self.zip(self.place, tree)}"


class TestHttp(RemoteContract):
    web: Nginx

    @pytest.fixture(autouse=True, scope="class")
    def _web(self, request: pytest.FixtureRequest, nginx: Nginx) -> None:
        request.cls.web = nginx

    def usable(self, tree: Tree) -> Tree:
        """Leave out the names that begin with a dot, which nginx does not list."""
        return {key: value for key, value in tree.items() if "/." not in "/" + key}

    def url(self, tree: Tree) -> str:
        base = write(self.web.listing.root, tree)
        return f"{self.web.listing.url}/{base.name}"


class TestZipOverHttp(TestZip):
    examples: ClassVar[int] = 10
    compression: ClassVar[int] = zipfile.ZIP_DEFLATED
    prefix: ClassVar[str] = ""
    web: Nginx

    @pytest.fixture(autouse=True, scope="class")
    def _web(self, request: pytest.FixtureRequest, nginx: Nginx) -> None:
        request.cls.web = nginx

    def url(self, tree: Tree) -> str:
        return f"zip://::{self.web.plain.url}/{self.zip(self.web.plain.root, tree).name}"


class TestS3(RemoteContract):
    examples: ClassVar[int] = 8
    server: S3

    @pytest.fixture(autouse=True, scope="class")
    def _server(self, request: pytest.FixtureRequest, s3: S3) -> None:
        request.cls.server = s3
        request.cls.options = Options(retries=0, storage={"s3": s3.options})

    def url(self, tree: Tree) -> str:
        name = f"tree{next(_numbers)}"
        for key, value in tree.items():
            self.server.client.put_object(Bucket=self.server.bucket, Key=f"{name}/{key}", Body=value)
        return f"s3://{self.server.bucket}/{name}"
