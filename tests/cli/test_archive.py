"""Archives made by zarrfs archive create, copied back; and what zarrfs check says of damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.archives.compiled import file, put
from tests.conftest import run
from tests.copying.trees import snapshot


def archive(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return an archive with 40 good files and one file for each kind of bad blob, and {bad file: the kind}."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    entries, wrong = [], {}
    for index in range(40):
        ref = put(blobs, b"%d" % index * 1000)
        length = 1000 * len(str(index))
        entries.append({"path": f"good/{index}", **file([[0, length, ref]], encoding="blobvec", size=length)})
    kinds = {"lying": "wrong hash", "short": "out of range", "lost": "missing", "fifo": "unreadable"}
    for name, kind in kinds.items():
        ref = put(blobs, name.encode() * 1000)
        length = 1000 * len(name)
        path = blobs / ref
        if name == "lying":
            path.write_bytes(b"-" * length)
        elif name == "short":
            path.write_bytes(b"-")
        else:
            path.unlink()
            if name == "fifo":
                os.mkfifo(path)
        wrong[f"bad/{name}"] = kind
        good = put(blobs, b"g" * 5000)  # the bad blob follows a good one
        vec = [[0, 5000, good], [5000, length, ref]]
        entries.append({"path": f"bad/{name}", **file(vec, encoding="blobvec", size=5000 + length)})
    return archive(tmp_path / "a.json", entries), wrong


def test_verify_names_every_bad_file(damaged: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    document, wrong = damaged
    done = run("check", document, "--blobs", tmp_path / "blobs", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["clean"]) == (1, 40, False)
    assert {bad["key"]: bad["kind"] for bad in report["bad"]} == wrong
    assert all("sha1-" in bad["url"] for bad in report["bad"])
    done = run("check", document, "--blobs", tmp_path / "blobs")
    assert done.returncode == 1
    assert {line.split(": ")[1] for line in done.stdout.splitlines() if ": bad/" in line} == wrong.keys()
    assert all("sha1-" in line for line in done.stdout.splitlines() if ": bad/" in line)


def test_creating_and_extracting_an_archive_restores_the_tree(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/big").write_bytes(os.urandom(3 << 20))
    (source / "a/small").write_bytes(b"\0\xff")
    (source / "a/text").write_text("text")
    (source / "empty").mkdir(mode=0o2700)
    (source / "link").symlink_to("a/b")
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"x", 1 << 29)
    (source / "a/small").chmod(0o4711)
    for name in ("a/b/big", "a/small", "a/text", "a/b", "a", "empty", "link", "sparse", "."):
        os.utime(source / name, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    blobs = ("--blobs", tmp_path / "blobs")
    assert run("archive", "create", "-C", source, "-O", tmp_path / "a.json", *blobs, ".").returncode == 0
    assert run("copy", tmp_path / "a.json", tmp_path / "out", *blobs).returncode == 0
    found, expected = snapshot(tmp_path / "out"), snapshot(source)
    del found[""], expected[""]  # the directory itself is not in the archive
    expected["a/small"] = expected["a/small"]._replace(mode=0o711)  # a copy never has set-ID bits
    assert found == expected
    assert os.stat(tmp_path / "out/sparse").st_blocks == os.stat(source / "sparse").st_blocks


def test_files_that_report_size_0_but_have_content_are_refused() -> None:
    done = run("archive", "create", "-C", "/proc/self", "--inline", "status")
    assert done.returncode == 1
    assert "status: has bytes, but a size of 0" in done.stderr
