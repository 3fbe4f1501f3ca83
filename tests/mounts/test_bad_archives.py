"""Archives that break a rule: mount, extract and verify each refuse them with one line, and write nothing.

The cases are the rows of the table "Decisions" in docs/archives.md that end with a refusal or an error for one file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.archives.compiled import D, F, L, blobref, file, put
from tests.conftest import run
from tests.mounts.mounting import mount_lines, mounted
from zarrfs.cli import main

SHA1 = blobref(b"x")
VEC = {"encoding": "blobvec", "size": 9}

Refusal = tuple[Any, list[str], list[str]]  # document, options, words of the line: the entry and the rule
REFUSED: dict[str, Refusal] = {
    "duplicate path, strict": (
        [{"path": "f", **file("1")}, {"path": "./f", **file("2")}], ["strict"], ["./f", "more than once"],
    ),
    "below a file": (
        [{"path": "f/x", **file("")}, {"path": "f", **file("")}], [], ["f", "a file used as the parent of f/x"],
    ),
    "below a symlink": (
        [{"path": "l", "mode": L, "data": "/etc"}, {"path": "l/x", **file("")}], [], ["l", "a symlink used as"],
    ),
    "..": ([{"path": "a/../../f", **file("")}], [], ["a/../../f", "'..'"]),
    "absolute": ([{"path": "/tmp/f", **file("")}], [], ["/tmp/f", "an absolute path"]),
    "empty path": ([{"path": "", **file("")}], [], ["[0]", "an empty path"]),
    "NUL": ([{"path": "a\0b", **file("")}], [], ["a\\x00b", "NUL"]),
    "trailing slash": ([{"path": "f/", **file("")}], [], ["f/", "a trailing slash"]),
    "size too small": ([{"path": "f", **file("abc", size=2)}], [], ["f", "smaller than its data"]),
    "size negative": ([{"path": "f", **file(size=-1)}], [], ["f", "a negative size"]),
    "size over the cap": ([{"path": "f", **file(size=2**62 + 1)}], [], ["f", "is over"]),
    "size too large": ([{"path": "f", **file("abc", size=4)}], [], ["f", "larger than its data"]),
    "base64": ([{"path": "f", **file("gIEAg", encoding="base64")}], [], ["f", "malformed base64"]),
    "lone surrogate": ([{"path": "f", **file("\ud800")}], [], ["f", "a lone surrogate"]),
    "garbage behind": (b"[] x", [], ["3"]),
    "too deep": (b"[" * 100_000, [], ["neste"]),
    "blobvec that is no list": ([{"path": "f", **file({}, **VEC)}], [], ["f", "a blobvec that is not a list"]),
    "short region": ([{"path": "f", **file([[0, 1]], **VEC)}], [], ["f", "region 0 is not"]),
    "region past the size": ([{"path": "f", **file([[9, 1, SHA1]], **VEC)}], [], ["f", "region 0 ends past size 9"]),
    "negative offset": ([{"path": "f", **file([[-1, 1, SHA1]], **VEC)}], [], ["f", "a negative offset"]),
    "no blobref": ([{"path": "f", **file([[0, 1, "sha1-../../x"]], **VEC)}], [], ["f", "is not a blobref"]),
    "fifo": ([{"path": "f", "mode": 0o010644}], [], ["f", "a fifo"]),
    "device": ([{"path": "f", "mode": 0o060644}], [], ["f", "a block device"]),
    "no type bits": ([{"path": "f", **file("", mode=0o644)}], [], ["f", "no type bits"]),
    "no mode": ([{"path": "f", "data": ""}], [], ["f", "no mode"]),
    "float mode": ([{"path": "f", **file("", mode=33188.0)}], [], ["f", "mode is not an integer"]),
    "float mtime": ([{"path": "f", **file("", mtime=1.5)}], [], ["f", "mtime is not an integer"]),
    "path in a dictionary": ({"f": file("", path="f")}, [], ["f", "a path inside"]),
    "long name": ([{"path": "n" * 256, **file("")}], [], ["nnn", "ENAMETOOLONG"]),
}  # fmt: skip


def refused(command: list[str], document: Path, options: list[str], words: list[str]) -> None:
    given = [*command, str(document), *(part for option in options for part in ("--option", option))]
    if command[0] == "mount":
        done = run(*given, document.parent / "mnt")
        status, text = done.returncode, done.stdout + done.stderr
    else:  # in this process, because starting Python for each command is slow
        found = CliRunner().invoke(main, given)
        status, text = found.exit_code, found.output
    assert status == 1, text
    assert len(text.splitlines()) == 1, text
    assert all(word in text for word in words), text
    assert str(document) in text


@pytest.mark.parametrize("command", ["mount", "extract", "verify"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, command: str, tmp_path: Path) -> None:
    what, options, words = REFUSED[name]
    document = tmp_path / "bad.json"
    document.write_bytes(what if isinstance(what, bytes) else json.dumps(what).encode())
    (tmp_path / "mnt").mkdir()
    arguments = {
        "mount": ["mount"], "extract": ["archive", "extract", "-C", str(tmp_path / "out")],
        "verify": ["archive", "verify"],
    }[command]  # fmt: skip
    refused(arguments, document, [*options, "type=archive"], words)
    assert not mount_lines(tmp_path / "mnt")
    assert sorted(os.listdir(tmp_path)) == ["bad.json", "mnt"]


def test_a_missing_or_wrong_blob_fails_its_file_only(tmp_path: Path) -> None:
    """The archive can be mounted; reads, extract and verify fail for the files whose blob is missing or wrong."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    lying, good = put(blobs, b"honest"), put(blobs, b"good")
    (blobs / lying).write_bytes(b"crooks")
    entries = {
        "lost": file([[0, 1, SHA1]], encoding="blobvec", size=1),
        "lying": file([[0, 6, lying]], encoding="blobvec", size=6),
        "good": file([[0, 4, good]], encoding="blobvec", size=4),
    }
    document = tmp_path / "a.json"
    document.write_text(json.dumps(entries))
    with mounted(document, tmp_path / "mnt", f"blobs={blobs}") as root:
        assert (root / "good").read_bytes() == b"good"
        for name in ("lost", "lying"):
            with pytest.raises(OSError, match=r"\[Errno 5\]"):
                (root / name).read_bytes()
    words = {"lost": SHA1, "lying": lying}
    done = run("archive", "extract", document, "-C", tmp_path / "out", "--blobs", blobs, "--keep-going")
    assert done.returncode == 1
    assert {line.split(": ")[1] for line in done.stderr.splitlines()} == words.keys()
    assert os.listdir(tmp_path / "out") == ["good"]
    done = run("archive", "verify", document, "--blobs", blobs)
    assert done.returncode == 1
    for name, ref in words.items():
        assert any(f": {name}: " in line and ref in line for line in done.stdout.splitlines()), done.stdout


def test_oddities_are_reported_once_and_extracted(tmp_path: Path) -> None:
    """Duplicates, unknown keys, data on a directory; regions that overlap, are out of order, or are empty."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    one, two, none = put(blobs, b"1" * 10), put(blobs, b"2" * 4), put(blobs, b"")
    entries = [
        {"path": "f", **file("1")}, {"path": "f", **file("2", owner=7)}, {"path": "d", "mode": D, "data": "x"},
        {"path": "o", **file([[5, 10, one], [3, 4, two], [1, 0, none]], encoding="blobvec", size=20)},
        {"path": "h", "mode": F, "size": 2**40},
    ]  # fmt: skip
    document = tmp_path / "a.json"
    document.write_text(json.dumps(entries))
    done = run("archive", "extract", document, "-C", tmp_path / "out", "--blobs", blobs)
    assert done.returncode == 0
    assert done.stderr.count("warning") == 3
    out = tmp_path / "out"
    assert (out / "f").read_bytes() == b"2"
    assert (out / "o").read_bytes() == b"\0\0\0" + b"2222" + b"1" * 8 + bytes(5)
    assert (os.stat(out / "h").st_size, os.stat(out / "h").st_blocks) == (2**40, 0)
