"""Writers on the overlay of a soak: each change is also made in a plain directory, and the results are compared."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

from tests.mounts.treemodel import Tree, attempt, snapshot
from tests.soak.places import Place
from tests.soak.tally import Tally
from tests.soak.world import World

_NAMES = 40  # number of names that each writer uses
_SIZE_MAX = 300_000  # bytes
_NEW, _MORE = os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_APPEND
_OF_THE_MOUNT = ("EIO", "ENOTCONN", "ECONNABORTED", "ENODEV")  # errors that a plain directory does not have

Call = tuple[str, tuple[object, ...]]  # a method of Tree and its arguments


def _changes(one: str, other: str, chance: random.Random) -> list[list[Call]]:
    """Return the changes from which to choose, each a list of calls."""
    data, size = chance.randbytes(chance.randrange(_SIZE_MAX)), chance.randrange(_SIZE_MAX)
    write: Call = ("write", (one, _NEW, 0o644, 0, data))
    opened: Call = ("open", (1, one, os.O_RDWR | os.O_NOFOLLOW))
    return [
        [write], [write], [("write", (one, _MORE, 0o644, 0, data[:5000]))], [("truncate", (one, size))],
        [("unlink", (one,))], [("rmdir", (one,))], [("rename", (one, other, 0))], [("mkdir", (one, 0o755))],
        [("symlink", (os.path.basename(other), one))], [("link", (other, one))],
        [opened, ("fsync", (1,))], [opened, ("map_write", (1, size, data[:9000] or b"x"))],
    ]  # fmt: skip


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
        if chance.random() < 0.1:
            return self._copy_up(place, chance, self._names.number)
        one, other = (f"{mine}/{chance.randrange(_NAMES)}" for _ in range(2))
        shown, plain = Tree(place.mountpoint), Tree(self._model)
        try:
            for name, arguments in chance.choice(_changes(one, other, chance)):
                found = attempt(lambda: getattr(shown, name)(*arguments))  # noqa: B023
                if found[0] == "failed" and found[1] in _OF_THE_MOUNT:
                    raise OSError(getattr(errno, str(found[1])), name)
                expected = attempt(lambda: getattr(plain, name)(*arguments))  # noqa: B023
                if found != expected:
                    raise AssertionError(f"{name} {one} {other}: {found}, but {expected} in a directory")
                if found[0] == "failed":
                    break
        finally:
            for tree in (shown, plain):
                for handle in list(tree.handles):
                    tree.close(handle)
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


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Return the mode and content of everything below a directory. Links are not counted: caches are dropped."""
    return {key: (about["mode"], about.get("content")) for key, about in snapshot(root).items()}
