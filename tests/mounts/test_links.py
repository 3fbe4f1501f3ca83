"""Symbolic links, special files and directories in place of chunks (docs/semantics.md, S51 to S53)."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted

DATA = np.arange(1, 33, dtype="<i8")
CHUNK = 8  # items; four chunks


class Case(NamedTuple):
    """A kind of entry in place of chunk 1, and the expected result of reading it."""

    make: Callable[[Path], None]  # takes the path of the chunk; its bytes are in annex/object next to the store
    reason: str = ""  # a pattern for the reason of the error; "": the chunk is read
    allowed: bool = False  # whether allow_path= covers the directory next to the store


def beside(chunk: Path) -> Path:
    """Return the path of the file with the chunk's bytes, which is outside of the store."""
    return next(path for path in chunk.parents if path.name == "store").parent / "annex" / "object"


def linked(target: Callable[[Path], str]) -> Callable[[Path], None]:
    return lambda chunk: chunk.symlink_to(target(chunk))


def inside(chunk: Path) -> str:
    store = beside(chunk).parent.parent / "store"
    shutil.copy(beside(chunk), store / "elsewhere")
    return os.path.relpath(store / "elsewhere", chunk.parent)


def relative(chunk: Path) -> str:
    return os.path.relpath(beside(chunk), chunk.parent)


def a_socket(chunk: Path) -> None:
    here = Path.cwd()
    os.chdir(chunk.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(chunk.name)
    finally:
        os.chdir(here)


CASES = {
    "inside": Case(linked(inside)),
    "relative, allowed": Case(linked(relative), allowed=True),
    "absolute, allowed": Case(linked(lambda chunk: str(beside(chunk))), allowed=True),
    "relative": Case(linked(relative), r"leads to .*/annex/object, which is out of the store \(-o allow_path=DIR\)"),
    "absolute": Case(linked(lambda chunk: str(beside(chunk))), r"which is out of the store \(-o allow_path=DIR\)"),
    "dangling": Case(linked(lambda chunk: "nowhere"), "a symbolic link to nowhere, which is not there"),
    "dangling, out": Case(linked(lambda chunk: "../../../annex/.git/annex/objects/x"), "git annex get", allowed=True),
    "circle": Case(linked(lambda chunk: chunk.name), "[Tt]oo many levels of symbolic links"),
    "fifo": Case(os.mkfifo, "a FIFO, which is not opened"),
    "socket": Case(a_socket, "a socket, which is not opened"),
    "device": Case(lambda chunk: os.mknod(chunk, 0o20666, os.makedev(1, 3)), "a device, which is not opened"),
    "directory": Case(Path.mkdir, "a directory"),
    "cut": Case(lambda chunk: chunk.write_bytes(beside(chunk).read_bytes()[:-1]), "[0-9]+ bytes|short|chunk"),
}


def store_of(base: Path, version: int) -> Path:
    """Make a store with one array, and move its chunk 1 out of the store, to `annex/object` next to it."""
    store = base / "store"
    array = zarr.create_array(
        store, name="x", shape=DATA.shape, chunks=(CHUNK,), dtype=DATA.dtype, zarr_format=version, fill_value=0,
        compressors=None,
    )  # fmt: skip
    array[:] = DATA
    if version == 2:  # zarr.create_array makes no group
        zarr.open_group(store, mode="a", zarr_format=2)
    (base / "annex").mkdir()
    os.rename(store / chunk_of(version), base / "annex/object")
    return store


def chunk_of(version: int) -> str:
    return "x/c/1" if version == 3 else "x/1"


def part(number: int) -> slice:
    return slice(number * CHUNK, (number + 1) * CHUNK)


SOME = ("absolute, allowed", "relative", "fifo", "directory", "cut")


VIEWS = [(name, "raw") for name in CASES] + [(name, view) for view in ("v2", "arrays") for name in SOME]


@pytest.mark.parametrize(("name", "view"), VIEWS)
def test_allowed_links_to_chunks_are_followed_and_other_entries_are_errors(
    name: str, view: str, tmp_path: Path
) -> None:
    """This holds with and without a view; `check` and `copy` follow the same rules for links."""
    case, version = CASES[name], 3
    store = store_of(tmp_path, version)
    case.make(store / chunk_of(version))
    options = [] if view == "raw" else [f"view={view}"]
    options += [f"allow_path={tmp_path}/annex"] if case.allowed else []
    bad, raw_directory = bool(case.reason), name == "directory" and view == "raw"
    with mounted(store, tmp_path / "mnt", *options) as mnt:
        if view == "arrays":
            read_flat(mnt / "x.npy", bad)
        else:
            read_chunks(mnt, version if view == "raw" else 2, bad and name != "cut", raw_directory)
        log = log_of(mnt)
    if bad and name != "cut" and not raw_directory:
        assert re.search(case.reason, log)
    if view != "raw":
        return
    allow = ["-o", f"allow_path={tmp_path}/annex"] if case.allowed else []
    done = run("check", store, *allow)
    assert done.returncode == (1 if bad else 0), done.stdout
    if bad:
        assert re.search(rf"^[a-z ]+: {chunk_of(version)}: .*({case.reason})", done.stdout, re.MULTILINE), done.stdout
    copied = run("copy", store, tmp_path / "copy", *allow)
    assert copied.returncode == (1 if bad and name not in ("cut", "directory", "fifo") else 0), copied.stderr
    if not bad:
        assert (tmp_path / "copy" / chunk_of(version)).read_bytes() == beside(store / "x").read_bytes()
        assert not (tmp_path / "copy" / chunk_of(version)).is_symlink()


def read_chunks(mnt: Path, version: int, bad: bool, raw_directory: bool) -> None:
    """Read an array chunk by chunk with zarr-python; `version` is the Zarr format that the mount shows."""
    key = chunk_of(version)
    names = sorted(os.listdir(mnt / os.path.dirname(key)))
    assert {"0", "1", "2", "3"} <= {*names}
    found = zarr.open_array(mnt / "x", mode="r")
    for number in (0, 2, 3):
        assert (found[part(number)] == DATA[part(number)]).all()
    if raw_directory:  # without a view, a directory is shown as it is
        assert (mnt / key).is_dir()
    elif bad:
        assert (mnt / key).is_file()
        assert (mnt / key).stat().st_size > 0  # tar(1) does not open an empty file, and would miss the error
        for read in (lambda: found[part(1)], (mnt / key).read_bytes):
            with pytest.raises(OSError) as caught:  # noqa: PT011
                read()
            assert caught.value.errno == errno.EIO
    elif (mnt / key).stat().st_size < DATA[part(1)].nbytes:  # a short chunk, which zarr-python reports
        with pytest.raises(ValueError, match="size must be a divisor"):
            found[part(1)]
    else:
        assert (found[part(1)] == DATA[part(1)]).all()


def read_flat(path: Path, bad: bool) -> None:
    header = path.stat().st_size - DATA.nbytes
    with open(path, "rb", buffering=0) as file:
        if not bad:
            assert os.pread(file.fileno(), DATA.nbytes, header) == DATA.tobytes()
            return
        with pytest.raises(OSError) as caught:  # noqa: PT011
            os.pread(file.fileno(), DATA.nbytes, header)
        assert caught.value.errno == errno.EIO


def test_a_fifo_is_never_opened(tmp_path: Path) -> None:
    """Opening the FIFO would unblock a writer that waits for a reader."""
    store = store_of(tmp_path, 2)
    os.mkfifo(store / "x/1")
    writer = threading.Thread(target=lambda: (store / "x/1").open("wb").close(), daemon=True)
    writer.start()
    with mounted(store, tmp_path / "mnt") as mnt:
        for _ in range(5):
            with pytest.raises(OSError, match="Input/output"):
                (mnt / "x/1").read_bytes()
        run("check", store)
        run("info", store)
        writer.join(0.2)
        assert writer.is_alive()
    os.close(os.open(store / "x/1", os.O_RDONLY | os.O_NONBLOCK))


def test_links_are_kept_in_plain_directories(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a").symlink_to("b")
    with mounted(plain, tmp_path / "mnt") as mnt:
        assert os.readlink(mnt / "a") == "b"


def test_links_of_a_lower_directory_are_kept_unless_they_lead_out(tmp_path: Path) -> None:
    """A link that leads out of the source is EIO, or with allow_path= the file that it leads to."""
    store = store_of(tmp_path, 2)
    (store / "x/1").symlink_to(relative(store / "x/1"))
    (store / "x/7").symlink_to("2")
    (store / "x/8").symlink_to("nothing")
    options = [f"upperdir={tmp_path}/up"]
    (tmp_path / "up").mkdir()
    with mounted(store, tmp_path / "mnt", *options) as mnt:
        assert os.readlink(mnt / "x/7") == "2"
        assert os.readlink(mnt / "x/8") == "nothing"
        with pytest.raises(OSError, match="Input/output"):
            (mnt / "x/1").read_bytes()
        (mnt / "x/1").unlink()
        assert not (mnt / "x/1").exists()
    shutil.rmtree(tmp_path / "up")
    (tmp_path / "up").mkdir()
    with mounted(store, tmp_path / "mnt", *options, f"allow_path={tmp_path}/annex") as mnt:
        assert (zarr.open_array(mnt / "x", mode="r")[:] == DATA).all()
        with open(mnt / "x/1", "r+b") as file:
            file.write(b"changed!")
        assert (tmp_path / "up/x/1").read_bytes()[:8] == b"changed!"
        assert (tmp_path / "annex/object").read_bytes()[:8] != b"changed!"


def test_links_to_directories_are_followed_if_allowed(tmp_path: Path) -> None:
    """The links lead to an allowed array, to a directory that is not allowed, to nothing, and to their own parent."""
    store, elsewhere = store_of(tmp_path, 2), tmp_path / "elsewhere"
    os.rename(tmp_path / "annex/object", store / "x/1")
    shutil.copytree(store / "x", elsewhere / "y")
    (store / "y").symlink_to("../elsewhere/y")
    (store / "z").symlink_to("../nowhere")
    (store / "x/up").symlink_to("../..")
    (store / "w").symlink_to(".")
    with mounted(store, tmp_path / "mnt", f"allow_path={elsewhere}") as mnt:
        assert (zarr.open_array(mnt / "y", mode="r")[:] == DATA).all()
        walked = subprocess.run(["find", mnt], capture_output=True, text=True, check=True, timeout=60).stdout
        assert walked.count("\n") < 40
        with pytest.raises(OSError, match="Input/output"):
            (mnt / "w").read_bytes()
    with mounted(store, tmp_path / "mnt", "view=v3", f"allow_path={elsewhere}") as mnt:
        assert (zarr.open_array(mnt / "y", mode="r")[:] == DATA).all()
        assert {"x", "y", "z"} <= {*os.listdir(mnt)}
        with pytest.raises(OSError, match="Input/output"):  # an error, instead of no array
            (mnt / "z/zarr.json").read_bytes()
    done = run("check", "-o", f"allow_path={elsewhere}", store)
    assert re.search("^[a-z ]+: z: .*nowhere, which is not there", done.stdout, re.MULTILINE)
    assert "\ny " in done.stdout  # the other arrays are checked


def test_no_race_leads_out(tmp_path: Path) -> None:
    """A link switches all the time between an allowed file and another one, of which no byte may ever be read."""
    store = store_of(tmp_path, 2)
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    chunk, new = store / "x/1", store / "new"
    chunk.symlink_to("../../annex/object")
    wanted, ended = (tmp_path / "annex/object").read_bytes(), threading.Event()

    def change() -> None:
        while not ended.is_set():
            for target in ("../../secret", "../../annex/object"):
                os.symlink(target, new)
                os.rename(new, chunk)

    changing = threading.Thread(target=change)
    with mounted(store, tmp_path / "mnt", f"allow_path={tmp_path}/annex", "attr_timeout=0") as mnt:
        changing.start()
        try:
            right = 0
            for _ in range(400):
                try:
                    assert (mnt / "x/1").read_bytes()[: len(wanted)] == wanted[:600]
                    right += 1
                except OSError as exc:
                    assert exc.errno in (errno.EIO, errno.ESTALE)  # noqa: PT017
        finally:
            ended.set()
            changing.join()
    assert right


def test_a_link_into_its_own_mount_is_an_error(tmp_path: Path) -> None:
    """Otherwise a lookup would wait for itself, and never end."""
    store = store_of(tmp_path, 2)
    (store / "x/1").symlink_to(tmp_path / "mnt/x/1")
    (store / "x/0").unlink()
    (store / "x/0").symlink_to(tmp_path / "mnt/x/2")
    with mounted(store, tmp_path / "mnt", f"allow_path={tmp_path}") as mnt:
        for name in ("x/0", "x/1"):
            with pytest.raises(OSError, match="Input/output"):
                (mnt / name).read_bytes()
        assert "lies in the mount" in log_of(mnt)


def test_an_annexed_store_in_a_directory_with_a_non_ascii_name_is_read(tmp_path: Path) -> None:
    """The main use of links: all files of a store are links made by git-annex. It is read, viewed and checked."""
    base = tmp_path / "Größe" / "数据"
    store, objects = base / "store.zarr", base / ".git/annex/objects"
    group = zarr.create_group(store)
    array = group.create_array("t", shape=(40, 40), chunks=(10, 10), dtype="f4")
    array[:] = data = np.random.default_rng(1).random((40, 40), "f4")
    for path in [path for path in store.rglob("*") if path.is_file()]:
        key = f"MD5E-s{path.stat().st_size}--{path.relative_to(store).as_posix().replace('/', '_')}"
        place = objects / key[-2:] / key / key
        place.parent.mkdir(parents=True)
        os.rename(path, place)
        place.chmod(0o444)
        path.symlink_to(os.path.relpath(place, path.parent))
    with mounted(store, tmp_path / "mnt", f"allow_path={base}") as mnt:
        assert (zarr.open_group(mnt, mode="r")["t"][:] == data).all()  # type: ignore[index]
        assert not [path for path in mnt.rglob("*") if path.is_symlink()]
    done = run("check", "-o", f"allow_path={base}", store)
    assert (done.returncode, "bad" in done.stdout) == (0, True), done.stdout
    for view in ("v2", "arrays"):
        with mounted(store, tmp_path / view, f"view={view}", f"allow_path={base}") as mnt:
            found = np.load(mnt / "t.npy") if view == "arrays" else zarr.open_group(mnt, mode="r")["t"][:]  # type: ignore[index]
            assert (found == data).all()
    done = run("check", store)
    assert done.returncode == 1
    assert "allow_path=DIR" in done.stdout
