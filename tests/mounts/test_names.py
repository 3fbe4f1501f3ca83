"""Any name that Linux allows, as source, target, key, mount point, upper, cache and blob directory, in any locale."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from tests.machine import ROOT, Machine
from tests.servers import serving

# One name for each cause of failure: characters that fail for the same reason share a name
NAMES = {
    "unicode": "Größe 数据 😀 e\u0301te\u0301", "latin1": os.fsdecode(b"l\xe4nge"), "blank": " a\tb ",
    "newline": "a\nb", "return": "a\rb", "comma": "a=b,allow_other,c=d", "backslash": "a\\b\\040",
    "quotes": "it's \"b\"", "url": "a?b*[c]#d%25", "dash": "-o ro", "long": "n" * 200, "job": "flux:ƒ2Kx",
}  # fmt: skip
KINDS = ("references", "archive", "zarr", "overlay", "remote")
LOCALES = ("C.UTF-8", "C", "POSIX")
WAYS = ("zarrfs", "mount", "fstab")
CONTENT = b"the bytes of the target\n"
EVERY = "ZARRFS_WHOLE_MATRIX" in os.environ  # all 540 cases, in ten minutes


def cases() -> Iterator[Any]:
    """Yield three cases for every name, two of them nightly; all pairs occur, except of a name and a kind."""
    turns = list(enumerate(itertools.product(LOCALES, WAYS)))
    for (row, name), (column, kind) in itertools.product(enumerate(NAMES), enumerate(KINDS)):
        step = (column - row) % len(KINDS)
        for turn, (locale, way) in turns:
            if EVERY or (step < 3 and turn == (3 * row + 7 * step) % len(turns)):
                yield pytest.param(name, kind, locale, way, marks=[pytest.mark.nightly] if step else [])


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as made:
        made.root(f"{ROOT}/scripts/install-helper")
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a web server that answers every path with CONTENT; yield its URL."""
    with serving(lambda method, path: (200, {"ETag": '"1"'}, CONTENT)) as url:
        yield url


def make(kind: str, base: Path, inside: str, name: str, server: str) -> tuple[str, list[str], str]:
    """Write a source of `kind` into `base`, `inside` in the machine; return (its path there, options, a key)."""
    text = name.encode("utf-8", "replace").decode() if name.isascii() or "\udce4" not in name else "plain"
    data = base / name
    data.write_bytes(CONTENT)
    key = f"{text}/{text}.0"
    if kind in ("references", "remote"):
        target = f"{inside}/{name}" if text == name else os.path.relpath(f"{inside}/link", inside)
        if kind == "remote":
            target = f"{server}/{quote_from_bytes(os.fsencode(name), safe='')}"
        elif text != name:
            os.symlink(name, base / "link")
        (base / f"{name}.json").write_text(json.dumps({"version": 1, "refs": {key: [target]}}))
        return f"{inside}/{name}.json", [f"cache_dir={inside}/cache {name}"] if kind == "remote" else [], key
    if kind == "archive":
        blob = hashlib.sha1(CONTENT).hexdigest()
        (base / f"blobs {name}").mkdir()
        (base / f"blobs {name}" / f"sha1-{blob}").write_bytes(CONTENT)
        regions = [[0, len(CONTENT), f"sha1-{blob}"]]
        entry = {"path": key, "mode": 0o100644, "encoding": "blobvec", "size": len(CONTENT), "data": regions}
        (base / f"{name}.json").write_text(json.dumps([entry]))
        return f"{inside}/{name}.json", [f"blobs={inside}/blobs {name}"], key
    group = base / f"store {name}" / name
    group.mkdir(parents=True)
    (group.parent / ".zgroup").write_text('{"zarr_format": 2}')
    (group / f"{name}.0").write_bytes(CONTENT)
    if kind == "zarr":
        return f"{inside}/store {name}", [], f"{name}/{name}.0"
    (base / f"upper {name}").mkdir()
    return f"{inside}/store {name}", [f"upperdir={inside}/upper {name}"], f"{name}/{name}.0"


def of_fstab(text: str) -> str:
    return re.sub(r"[\s\\#]", lambda match: f"\\{ord(match[0]):03o}", text)


def source_of(machine: Machine, place: str) -> list[str]:
    """Return the sources of the mounts on exactly `place`, from the machine's mount table."""
    lines = Path(f"/proc/{machine.pid}/mountinfo").read_bytes().split(b"\n")
    fields = [[re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), field) for field in line.split(b" ")]
              for line in lines]  # fmt: skip
    return [os.fsdecode(each[-2]) for each in fields if len(each) > 4 and each[4] == os.fsencode(place)]


@pytest.mark.parametrize(("name", "kind", "locale", "way"), list(cases()))
def test_any_name_can_be_mounted(
    machine: Machine, server: str, name: str, kind: str, locale: str, way: str
) -> None:
    word = NAMES[name]
    inside = f"/home/{len(os.listdir(machine.path('/home')))}"
    base = machine.path(inside)
    base.mkdir()
    source, options, key = make(kind, base, inside, word, server)
    place = f"{inside}/mnt {word}"
    os.mkdir(base / f"mnt {word}")
    listed = [option.replace("\\", "\\\\").replace(",", "\\,") for option in options]
    if way == "zarrfs":
        said = [f"-o{option}" for option in listed]
        done = machine.run("zarrfs", "mount", *said, "--", source, place, LC_ALL=locale)
    elif way == "mount":
        said = ["-o", ",".join(listed)] if listed else []
        done = machine.run("mount", "-t", "zarrfs", *said, "--", source, place, LC_ALL=locale)
    else:
        table = f"{of_fstab(source)} {of_fstab(place)} zarrfs {of_fstab(','.join(['defaults', *listed]))} 0 0\n"
        (base / "fstab").write_bytes(os.fsencode(table))
        done = machine.run("mount", "-T", f"{inside}/fstab", place, LC_ALL=locale)
    assert (done.returncode, done.stderr) == (0, "")
    try:
        assert source_of(machine, place) == [source]
        mnt = base / f"mnt {word}"
        assert (mnt / key).read_bytes() == CONTENT
        found = [os.path.join(at, file) for at, _, files in os.walk(mnt) for file in files if not file.startswith(".")]
        assert [os.path.relpath(path, mnt) for path in found] == [key]
        if kind == "overlay":
            (mnt / f"new {word}").write_bytes(b"new")
            assert (base / f"upper {word}" / f"new {word}").read_bytes() == b"new"
        for command in ("stats", "refresh") if way == "zarrfs" else ():
            if (command, kind) == ("refresh", "overlay"):
                continue
            done = machine.run("zarrfs", command, "--", place, LC_ALL=locale)
            assert (done.returncode, done.stderr) == (0, ""), command
        if way == "fstab":  # mount -a recognises the mount and adds no second one
            assert machine.run("mount", "-a", "-T", f"{inside}/fstab", LC_ALL=locale).returncode == 0
            assert source_of(machine, place) == [source]
    finally:
        unmount = ["zarrfs", "umount"] if way == "zarrfs" else ["umount"]
        done = machine.run(*unmount, "--", place, LC_ALL=locale)
    assert (done.returncode, done.stderr) == (0, "")
    assert source_of(machine, place) == []


@pytest.mark.parametrize("name", ["latin1", "newline", "comma", "backslash"])
def test_a_user_can_mount_any_name(machine: Machine, name: str) -> None:
    """fusermount3, which mounts for users, splits its options at commas and treats backslashes as escapes."""
    if not os.path.exists(machine.path("/home/ann")):
        machine.user("ann")
    word, inside = NAMES[name], f"/home/ann/{len(os.listdir(machine.path('/home/ann')))}"
    machine.root(f"install -d -o ann {inside}")
    base = machine.path(inside)
    (base / word).mkdir()
    (base / word / ".zgroup").write_text('{"zarr_format": 2}')
    os.mkdir(base / f"mnt {word}")
    os.chown(base / f"mnt {word}", *(os.stat(base).st_uid, -1))
    place = f"{inside}/mnt {word}"
    done = machine.run("zarrfs", "mount", "--", f"{inside}/{word}", place, user="ann", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert source_of(machine, place) == [f"{inside}/{word}"]
    done = machine.run("cat", f"{place}/.zgroup", user="ann")
    assert done.stdout == '{"zarr_format": 2}'
    done = machine.run("zarrfs", "umount", "--", place, user="ann", LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert source_of(machine, place) == []


def test_keys_are_found_where_python_does_not_decode_names_as_utf8(machine: Machine) -> None:
    """As with LC_ALL=en_US (ISO 8859-1). The key is looked up without a listing before it."""
    inside = "/home/keys"
    (base := machine.path(inside)).mkdir()
    (base / "mnt").mkdir()
    (base / "set.json").write_text(json.dumps({"version": 1, "refs": {"é/0": "value"}}))
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = machine.run("zarrfs", "mount", f"{inside}/set.json", f"{inside}/mnt", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    try:
        assert (base / "mnt/é/0").read_text() == "value"
    finally:
        assert machine.run("umount", f"{inside}/mnt").returncode == 0
