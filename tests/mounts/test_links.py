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

    make: Callable[[Path], None]  # takes the path of the chunk; its bytes are in beside()
    reason: str = ""  # a pattern for the reason of the error; "": the chunk is read
    allowed: bool = False  # whether allow_path= covers the file with its bytes


def beside(chunk: Path) -> Path:
    """Return the path of the file with the chunk's bytes, outside of the store; allow_path= covers `annex`."""
    store = next(path for path in chunk.parents if path.name == "store")
    array = chunk.relative_to(store).parts[0]
    return next(path for path in (store.parent / "annex" / array, store.parent / "other" / array) if path.exists())


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
    "relative-allowed": Case(linked(relative), allowed=True),
    "absolute-allowed": Case(linked(lambda chunk: str(beside(chunk))), allowed=True),
    "relative": Case(linked(relative), r"which is out of the store \(-o allow_path=DIR\)"),
    "absolute": Case(linked(lambda chunk: str(beside(chunk))), r"which is out of the store \(-o allow_path=DIR\)"),
    "dangling": Case(linked(lambda chunk: "nowhere"), "a symbolic link to nowhere, which is not there"),
    "dangling-out": Case(linked(lambda chunk: "../../../annex/.git/annex/objects/x"), "git annex get", allowed=True),
    "circle": Case(linked(lambda chunk: chunk.name), "[Tt]oo many levels of symbolic links"),
    "fifo": Case(os.mkfifo, "a FIFO, which is not opened"),
    "socket": Case(a_socket, "a socket, which is not opened"),
    "device": Case(lambda chunk: os.mknod(chunk, 0o20666, os.makedev(1, 3)), "a device, which is not opened"),
    "directory": Case(Path.mkdir, "a directory"),
    "cut": Case(lambda chunk: chunk.write_bytes(beside(chunk).read_bytes()[:-1]), "[0-9]+ bytes|short|chunk"),
}


def store_of(base: Path) -> Path:
    """Make a store with one array, and move its chunk 1 out of the store, to `annex/x` next to it."""
    store = base / "store"
    array = zarr.create_array(
        store, name="x", shape=DATA.shape, chunks=(CHUNK,), dtype=DATA.dtype, zarr_format=2, fill_value=0,
        compressors=None,
    )  # fmt: skip
    array[:] = DATA
    zarr.open_group(store, mode="a", zarr_format=2)  # zarr.create_array makes no group
    (base / "annex").mkdir()
    os.rename(store / "x/1", base / "annex/x")
    return store


def part(number: int) -> slice:
    return slice(number * CHUNK, (number + 1) * CHUNK)


def test_allowed_links_to_chunks_are_followed_and_other_entries_are_errors(tmp_path: Path) -> None:
    """This holds with and without a view; `check` and `copy` follow the same rules for links."""
    store, allow = tmp_path / "store", f"allow_path={tmp_path}/annex"
    group = zarr.create_group(store)
    for name, case in CASES.items():
        array = group.create_array(name, shape=DATA.shape, chunks=(CHUNK,), dtype=DATA.dtype, compressors=None)
        array[:] = DATA
        place = tmp_path / ("annex" if case.allowed else "other") / name
        place.parent.mkdir(exist_ok=True)
        os.rename(store / name / "c/1", place)
        case.make(store / name / "c/1")
    with mounted(store, tmp_path / "mnt", allow) as mnt, mounted(store, tmp_path / "v", allow, "view=arrays") as at:
        for name, case in CASES.items():
            read_flat(at / f"{name}.npy", bool(case.reason))
            read_chunks(mnt / name, case.reason != "" and name != "cut", name == "directory")
        log, of_view = log_of(mnt), log_of(at)
    for name, case in CASES.items():
        if case.reason and name != "cut":
            assert re.search(rf"{name}.*({case.reason})", of_view), name
            assert name == "directory" or re.search(rf"{name}.*({case.reason})", log), name
    done = run("check", "-o", allow, store)
    copied = run("copy", "-o", allow, store, tmp_path / "copy")
    assert (done.returncode, copied.returncode) == (1, 1)
    for name, case in CASES.items():
        found = re.search(rf"^[a-z ]+: {name}/c/1: (.*)", done.stdout, re.MULTILINE)
        if case.reason:
            assert found is not None
            assert re.search(case.reason, found[1]), name
        else:
            assert found is None
            assert (tmp_path / "copy" / name / "c/1").read_bytes() == beside(store / name / "c/1").read_bytes()
            assert not (tmp_path / "copy" / name / "c/1").is_symlink()
        failed = re.search(rf"{name}/c/1: ", copied.stderr) is not None
        assert failed == (bool(case.reason) and name not in ("cut", "directory", "fifo")), copied.stderr


def read_chunks(array: Path, bad: bool, directory: bool) -> None:
    """Read an array chunk by chunk with zarr-python; chunk 1 may be bad."""
    key = "c/1"
    assert {"0", "1", "2", "3"} <= {*os.listdir(array / "c")}
    found = zarr.open_array(array, mode="r")
    for number in (0, 2, 3):
        assert (found[part(number)] == DATA[part(number)]).all()
    if directory:  # without a view, a directory is shown as it is
        assert (array / key).is_dir()
    elif bad:
        assert (array / key).is_file()
        assert (array / key).stat().st_size > 0  # tar(1) does not open an empty file, and would miss the error
        for read in (lambda: found[part(1)], (array / key).read_bytes):
            with pytest.raises(OSError) as caught:  # noqa: PT011
                read()
            assert caught.value.errno == errno.EIO
    elif (array / key).stat().st_size < DATA[part(1)].nbytes:  # a short chunk, which zarr-python reports
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
    store = store_of(tmp_path)
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
    store = store_of(tmp_path)
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
        assert (tmp_path / "annex/x").read_bytes()[:8] != b"changed!"


def test_links_to_directories_are_followed_if_allowed(tmp_path: Path) -> None:
    """The links lead to an allowed array, to a directory that is not allowed, to nothing, and to their own parent."""
    store, elsewhere = store_of(tmp_path), tmp_path / "elsewhere"
    os.rename(tmp_path / "annex/x", store / "x/1")
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
    store = store_of(tmp_path)
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    chunk, new = store / "x/1", store / "new"
    chunk.symlink_to("../../annex/x")
    wanted, ended = (tmp_path / "annex/x").read_bytes(), threading.Event()

    def change() -> None:
        while not ended.is_set():
            for target in ("../../secret", "../../annex/x"):
                os.symlink(target, new)
                os.rename(new, chunk)

    changing = threading.Thread(target=change)
    with mounted(store, tmp_path / "mnt", f"allow_path={tmp_path}/annex", "attr_timeout=0") as mnt:
        changing.start()
        try:
            right = 0
            for _ in range(60):
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
    store = store_of(tmp_path)
    (store / "x/1").symlink_to(tmp_path / "mnt/x/1")
    (store / "x/0").unlink()
    (store / "x/0").symlink_to(tmp_path / "mnt/x/2")
    with mounted(store, tmp_path / "mnt", f"allow_path={tmp_path}") as mnt:
        for name in ("x/0", "x/1"):
            with pytest.raises(OSError, match="Input/output"):
                (mnt / name).read_bytes()
        assert "lies in the mount" in log_of(mnt)
