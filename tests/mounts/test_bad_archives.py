"""Archives with entries that break a rule: these are listed, and reading them fails; nothing is silently absent."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.archives.compiled import L, blobref, file, put
from tests.conftest import run
from tests.mounts.mounting import log_of, mounted

SHA1 = blobref(b"x")

Entry = dict[str, Any]
BROKEN: dict[str, tuple[Entry, str]] = {  # entries that are listed and cannot be read, and a word of the rule
    "size too small": (file("abc", size=2), "size 2"),
    "base64": (file("gIEAg", encoding="base64"), "base64"),
    "lone surrogate": (file("\ud800"), "surrogate"),
    "negative offset": (file([[-1, 1, SHA1]], encoding="blobvec", size=9), "region 0"),
    "symlink without target": ({"mode": L}, "target"),
    "fifo": ({"mode": 0o010644}, "mode"),
}  # tests/archives/test_parse.py has all rules
NO_PATHS = ["a/../../f", "/tmp/f", "", "a\0b", "n" * 256]


def test_bad_entries_are_listed_and_fail_to_read(tmp_path: Path) -> None:
    entries = {f"d/{name}": entry for name, (entry, _) in BROKEN.items()} | {"good": file("right")}
    document = tmp_path / "bad.json"
    document.write_text(json.dumps(entries | {path: file("x") for path in NO_PATHS}))
    with mounted(document, tmp_path / "mnt") as root:
        assert sorted(os.listdir(root)) == ["d", "good"]
        assert sorted(os.listdir(root / "d")) == sorted(BROKEN)
        for name in BROKEN:
            assert stat.S_ISREG(os.stat(root / "d" / name).st_mode)
            for _ in range(2):
                with pytest.raises(OSError, match=r"\[Errno 5\]"):
                    (root / "d" / name).read_bytes()
        assert (root / "good").read_text() == "right"
        lines = [line for line in log_of(root).splitlines() if "[EIO]" in line]
        for name, (_, word) in BROKEN.items():
            assert len([line for line in lines if f"d/{name}:" in line and word in line]) == 1, lines
    done = run("check", "--json", "-n", "100", document)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert {bad["key"] for bad in report["bad"]} == {f"d/{name}" for name in BROKEN}
    for bad in report["bad"]:
        assert BROKEN[bad["key"].removeprefix("d/")][1] in bad["reason"]
    assert (report["ok"], report["left_out"]) == (1, len(NO_PATHS))
    about = json.loads(run("info", "--json", document).stdout)
    assert (about["broken"], len(about["problems"])) == (len(BROKEN), len(NO_PATHS))


def test_a_missing_or_wrong_blob_fails_its_file_only(tmp_path: Path) -> None:
    """The archive can be mounted; reads, copy and check fail for the files whose blob is missing or wrong."""
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
    done = run("copy", document, tmp_path / "out", "--blobs", blobs)
    assert done.returncode == 1
    assert {line.split(": ")[1] for line in done.stderr.splitlines()} == words.keys()
    assert os.listdir(tmp_path / "out") == ["good"]
    done = run("check", document, "-o", f"blobs={blobs}")
    assert done.returncode == 1
    for name, ref in words.items():
        assert any(f": {name}: " in line and ref in line for line in done.stdout.splitlines()), done.stdout
