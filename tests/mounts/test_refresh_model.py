"""Random operations on a mount whose source changes, compared with a model: a dictionary of bytes per version."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts.mounting import mounted
from tests.mounts.refreshing import NAMES, Files, directories, names_in, refresh, some_files, write_set

POOL = [*NAMES, *(f"{one}/{other}" for one in NAMES for other in NAMES), *(f"keep/{name}" for name in NAMES)]


class Uses:
    """Open files, listings and a directory in the mount, with the content that each must have."""

    def __init__(self, root: Path, document: Path, chance: random.Random) -> None:
        self.root, self.document, self.chance = root, document, chance
        self.number = 0
        self.files: Files = {}
        self.open: list[tuple[int, bytes]] = []
        # of each listing: the names that were read, those of all versions since it began, those of any of them
        self.listings: list[tuple[Iterator[os.DirEntry[str]], set[str], set[str], set[str]]] = []
        self.keep = os.open(root / "keep", os.O_PATH | os.O_DIRECTORY)

    def change(self) -> None:
        """Write a new version of the document and refresh."""
        self.number += 1
        self.files = some_files(self.chance, self.number)
        write_set(self.document, self.files)
        for _, _, always, ever in self.listings:
            always &= names_in(self.files, "many")
            ever |= names_in(self.files, "many")
        assert refresh(self.root) == "refreshed"

    def open_one(self) -> None:
        key = self.chance.choice(sorted(self.files))
        descriptor = os.open(self.root / key, os.O_RDONLY)
        self.open.append((descriptor, self.files[key]))
        if self.chance.random() < 0.5:
            self.read_one()

    def read_one(self) -> None:
        if self.open:
            descriptor, data = self.chance.choice(self.open)
            at, size = self.chance.randrange(len(data) + 5), self.chance.randrange(300)
            assert os.pread(descriptor, size, at) == data[at : at + size]
            assert os.fstat(descriptor).st_size == len(data)

    def close_one(self) -> None:
        if self.open:
            descriptor, data = self.open.pop(self.chance.randrange(len(self.open)))
            assert os.pread(descriptor, len(data) + 1, 0) == data
            os.close(descriptor)

    def stat_one(self) -> None:
        key = self.chance.choice(POOL)
        self.look(self.root / key, key, None)

    def stat_in_a_held_directory(self) -> None:
        name = self.chance.choice(NAMES)
        self.look(Path(name), f"keep/{name}", self.keep)
        assert os.readlink(f"/proc/self/fd/{self.keep}") == str(self.root / "keep")

    def look(self, path: Path, key: str, dir_fd: int | None) -> None:
        """Check that a name has the type and size that it has in the newest version, or is absent from it."""
        try:
            found = os.stat(path, dir_fd=dir_fd)
        except OSError as exc:
            assert exc.errno in (errno.ENOENT, errno.ENOTDIR)  # noqa: PT017
            assert key not in self.files
            assert key not in directories(self.files)
        else:
            if stat.S_ISDIR(found.st_mode):
                assert key in directories(self.files)
            else:
                assert found.st_size == len(self.files[key])

    def list_one(self) -> None:
        directory = self.chance.choice(sorted(directories(self.files)))
        assert set(os.listdir(self.root / directory)) == names_in(self.files, directory)

    def begin_listing(self) -> None:
        entries = os.scandir(self.root / "many")
        first = {next(entries).name for _ in range(self.chance.randrange(5))}
        self.listings.append((entries, first, names_in(self.files, "many"), names_in(self.files, "many")))

    def end_listing(self) -> None:
        """Check that a listing returns each name once, and all that were there from its begin to its end."""
        if self.listings:
            entries, first, always, ever = self.listings.pop(self.chance.randrange(len(self.listings)))
            rest = [entry.name for entry in entries]
            assert len({*first, *rest}) == len(first) + len(rest)
            assert always <= {*first, *rest} <= ever

    def close(self) -> None:
        while self.open:
            self.close_one()
        while self.listings:
            self.end_listing()
        os.close(self.keep)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))])
def test_every_open_handle_keeps_its_version(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    document = tmp_path / "set.json"
    files = some_files(chance, 0)
    write_set(document, files)
    with mounted(document, tmp_path / "mnt") as root:
        uses = Uses(root, document, chance)
        uses.files = files
        steps = [
            uses.open_one, uses.open_one, uses.read_one, uses.read_one, uses.close_one, uses.stat_one, uses.stat_one,
            uses.stat_in_a_held_directory, uses.list_one, uses.begin_listing, uses.end_listing,
        ]  # fmt: skip
        with contextlib.closing(uses):
            for _ in range(6):
                for _ in range(80):
                    chance.choice(steps)()
                uses.change()
            for _ in range(100):
                chance.choice(steps)()
