"""Writers on the overlay of a soak: each change is also made in a plain directory, and the results are compared."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import shutil
import stat
import threading
from pathlib import Path

from tests.soak.places import Place
from tests.soak.tally import Tally
from tests.soak.world import World

_NAMES = 40  # number of names that each writer uses
_SIZE_MAX = 300_000  # bytes


class Model:
    """A plain directory that receives every change made to the overlay; each writer has its own names in both."""

    def __init__(self, world: World) -> None:
        self._model = world.model
        self._lower = world.place("overlay").values
        self._copied: dict[str, None] = {}  # keys of the lower source that were changed
        self._names = threading.local()
        self._writers = 0

    def act(self, place: Place, chance: random.Random, tally: Tally) -> int:
        """Make one random change to the mount and to the model; raise AssertionError if the results differ."""
        if not hasattr(self._names, "number"):
            self._writers += 1
            self._names.number = self._writers
        mine = f"w{self._names.number}"
        for root in (place.mountpoint, self._model):
            (root / mine).mkdir(exist_ok=True)
        one, other = (f"{mine}/{chance.randrange(_NAMES)}" for _ in range(2))
        change = chance.choice((_write, _write, _append, _truncate, _remove, _rename, _link, _mapped, _directory))
        if chance.random() < 0.1:
            return self._copy_up(place, chance, self._names.number)
        state = chance.getstate()
        results = []
        for root in (place.mountpoint, self._model):
            chance.setstate(state)
            results.append(_outcome(change, root, one, other, chance))
        if results[0] != results[1]:
            raise AssertionError(f"{change.__name__} {one} {other}: {results[0]}, but {results[1]} in a directory")
        return 0

    def _copy_up(self, place: Place, chance: random.Random, writer: int) -> int:
        """Overwrite a part of a file of the lower source; no two writers change the same file."""
        keys = [key for at, key in enumerate(place.keys) if at % 2 == writer % 2 and key.startswith("a/")]
        key, at, data = chance.choice(keys), chance.randrange(1400), chance.randbytes(chance.randrange(1, 2000))
        own = self._model / key
        if not own.exists():
            own.parent.mkdir(exist_ok=True, parents=True)
            own.write_bytes(self._lower[key])
        for root in (place.mountpoint, self._model):
            with (root / key).open("r+b") as file:
                file.seek(at)
                file.write(data)
        self._copied[key] = None
        return len(data)

    def differences(self, place: Place) -> list[str]:
        """Compare the mount with the model and return the differences; the writers must be idle."""
        found = []
        for folder in sorted(path.name for path in self._model.iterdir() if path.name.startswith("w")):
            own, theirs = _tree(self._model / folder), _tree(place.mountpoint / folder)
            keys = own.keys() | theirs.keys()
            found += [f"{folder}/{key}: differs" for key in sorted(keys) if own.get(key) != theirs.get(key)]
        for key in self._copied:
            if (place.mountpoint / key).read_bytes() != (self._model / key).read_bytes():
                found.append(f"{key}: differs")
        return found


def _outcome(change: object, root: Path, one: str, other: str, chance: random.Random) -> int | str:
    """Return the result of a change, or its errno as text; raise errors that only a mount can cause."""
    try:
        return change(root, one, other, chance)  # type: ignore[operator,no-any-return]
    except OSError as exc:
        if exc.errno in (errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV):  # from the mount
            raise
        return f"errno {exc.errno}"


def _tree(root: Path) -> dict[str, object]:
    """Return the mode and content of everything below a directory, and the targets of symlinks."""
    found: dict[str, object] = {}
    for folder, _, files in os.walk(root):
        found[os.path.relpath(folder, root)] = stat.S_IMODE(os.stat(folder).st_mode)
        for name in files:
            path = Path(folder, name)
            key = os.path.relpath(path, root)
            found[key] = os.readlink(path) if path.is_symlink() else (path.stat().st_mode, path.read_bytes())
    return found


def _write(root: Path, one: str, other: str, chance: random.Random) -> int:
    data = chance.randbytes(chance.randrange(_SIZE_MAX))
    with (root / one).open("wb", buffering=0) as file:
        file.write(data)
        if chance.random() < 0.2:
            os.fsync(file.fileno())
    return len(data)


def _append(root: Path, one: str, other: str, chance: random.Random) -> int:
    data = chance.randbytes(chance.randrange(5000))
    with (root / one).open("ab", buffering=0) as file:
        file.write(data)
    return len(data)


def _truncate(root: Path, one: str, other: str, chance: random.Random) -> int:
    os.truncate(root / one, chance.randrange(_SIZE_MAX))
    return 0


def _remove(root: Path, one: str, other: str, chance: random.Random) -> int:
    path = root / one
    if path.is_dir() and not path.is_symlink():
        if chance.random() < 0.5:
            shutil.rmtree(path)
        else:
            path.rmdir()
    else:
        path.unlink()
    return 0


def _rename(root: Path, one: str, other: str, chance: random.Random) -> int:
    os.rename(root / one, root / other)
    return 0


def _link(root: Path, one: str, other: str, chance: random.Random) -> int:
    if chance.random() < 0.5:
        os.symlink(os.path.basename(other), root / one)
    else:
        os.link(root / other, root / one, follow_symlinks=False)
    return 0


def _directory(root: Path, one: str, other: str, chance: random.Random) -> int:
    (root / one).mkdir()
    (root / one / "inside").write_bytes(chance.randbytes(100))
    return 0


def _mapped(root: Path, one: str, other: str, chance: random.Random) -> int:
    """Write through a shared mapping."""
    descriptor = os.open(root / one, os.O_RDWR | os.O_NOFOLLOW)
    with contextlib.closing(os.fdopen(descriptor, "r+b", buffering=0)):
        size = os.fstat(descriptor).st_size
        if not size:
            return 0
        data = chance.randbytes(min(size, 9000))
        with mmap.mmap(descriptor, size) as memory:
            at = chance.randrange(size - len(data) + 1)
            memory[at : at + len(data)] = data
    return len(data)
