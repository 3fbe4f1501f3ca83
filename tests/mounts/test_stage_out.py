"""Tests of `zarrfs stage-out`: it saves a job's changes as an archive, or as files in a directory or at a URL."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DATA, run
from tests.copying.extracting import snapshot
from tests.mounts.mounting import mounted
from tests.mounts.staging import Node, one_line
from tests.mounts.staging import node as node
from tests.servers import S3
from tests.servers import s3 as s3

SOURCE = DATA / "zarr/v2_hier"
BIG = bytes(range(256)) * 5000


def job(node: Node) -> Path:
    """Return a staged mount after a job wrote to it; its upper directory is `node.path / "upper"`."""
    dest = node.path / "work"
    assert run("stage", SOURCE, dest, "-o", f"upperdir={node.path / 'upper'}").returncode == 0
    (dest / "new").mkdir()
    (dest / "new/big").write_bytes(BIG)
    (dest / "new/nämé").write_text("small")
    (dest / ".zattrs").write_text("{}")
    (dest / "gzip/.zarray").unlink()
    subprocess.run(["rm", "-r", dest / "blosc"], check=True)
    return dest


WRITTEN = {"new/big": BIG, "new/nämé": b"small", ".zattrs": b"{}"}
DELETED = ["blosc", "gzip/.zarray"]


def kept(*arguments: object) -> dict[str, object]:
    """Run `zarrfs stage-out` and return its report."""
    done = run("stage-out", *arguments, "--report", "-")
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def values(path: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory by their relative paths."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_archive_holds_what_was_written(node: Node) -> None:
    dest, blobs, archive = job(node), node.path / "blobs", node.path / "result.json"
    blobs.mkdir()
    done = run("stage-out", dest, "-O", archive, "--blobs", blobs)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"zarrfs: deleted: {key}" for key in DELETED]
    with mounted(archive, node.path / "mnt", f"blobs={blobs}") as root:
        assert values(root) == WRITTEN
    assert "already exists" in one_line(run("stage-out", dest, "-O", archive, "--blobs", blobs).stderr)
    assert run("unstage", dest).returncode == 0
    assert kept("--upperdir", node.path / "upper", "-O", archive, "--inline", "--force")["deleted"] == DELETED
    with mounted(archive, node.path / "mnt") as root:
        assert values(root) == WRITTEN


def test_merged_saves_all_files_of_the_mount(node: Node) -> None:
    dest, out = job(node), node.path / "out"
    kept(dest, "--merged", "--to", out)
    assert values(out) == values(dest)
    assert {"gzip/.zarray", "blosc/.zarray"}.isdisjoint(values(out))
    assert values(out).items() >= WRITTEN.items()
    archive = node.path / "all.json"
    kept(dest, "--merged", "--inline", "-O", archive)
    with mounted(archive, node.path / "mnt") as root:
        assert values(root) == values(dest)


def test_only_changed_or_missing_files_are_sent_to_s3_again(node: Node, s3: S3) -> None:
    dest, url = job(node), f"s3://{s3.bucket}/results/job1"
    options = ["--option", ",".join(f"s3.{name}={value}" for name, value in s3.options.items())]
    report = kept(dest, "--to", url, *options)
    assert (report["files"], report["skipped"], report["deleted"]) == (3, 0, DELETED)

    def there() -> dict[str, bytes]:
        listed = s3.client.list_objects_v2(Bucket=s3.bucket, Prefix="results/job1/").get("Contents", [])
        keys = [one["Key"] for one in listed]
        return {key[13:]: s3.client.get_object(Bucket=s3.bucket, Key=key)["Body"].read() for key in keys}

    assert there() == WRITTEN
    assert kept(dest, "--to", url, *options)["skipped"] == 3
    s3.client.delete_object(Bucket=s3.bucket, Key="results/job1/new/big")
    s3.client.put_object(Bucket=s3.bucket, Key="results/job1/.zattrs", Body=b"cut")  # of another size
    (dest / "new/nämé").write_text("other")
    assert kept(dest, "--to", url, *options)["skipped"] == 0
    assert there() == {**WRITTEN, "new/nämé": b"other"}
    assert not [name for name in os.listdir(dest) if name.startswith(".zarrfs")]  # the journal of sent files is hidden


def test_a_failure_names_its_key(node: Node, s3: S3) -> None:
    dest = job(node)
    options = ["--option", ",".join(f"s3.{name}={value}" for name, value in s3.options.items()) + ",retries=0"]
    done = run("stage-out", dest, "--to", "s3://no-such-bucket/x", *options)
    assert done.returncode == 1
    assert any(key in one_line(done.stderr) for key in WRITTEN)
    done = run("stage-out", dest, "--to", "s3://no-such-bucket/x", *options, "--keep-going", "--report", "-")
    assert done.returncode == 1
    assert sorted(bad["key"] for bad in json.loads(done.stdout)["failed"]) == sorted(WRITTEN)


def test_an_upper_in_use_by_another_mount_is_refused(node: Node) -> None:
    upper, out = node.path / "upper", node.path / "out"
    upper.mkdir()
    with mounted(SOURCE, node.path / "mnt", f"upperdir={upper}") as root:
        (root / "new").write_text("x")
        done = run("stage-out", "--upperdir", upper, "--to", out)
        assert (done.returncode, "in use by another mount" in one_line(done.stderr)) == (1, True)
        assert not out.exists()
    kept("--upperdir", upper, "--to", out)
    assert values(out) == {"new": b"x"}


def test_links_are_refused_or_left_out(node: Node, s3: S3) -> None:
    """A URL cannot store symbolic links, and no destination can store FIFOs."""
    dest, out = job(node), node.path / "out"
    (dest / "link").symlink_to("new/big")
    url = (f"s3://{s3.bucket}/links", "--option", ",".join(f"s3.{name}={value}" for name, value in s3.options.items()))
    done = run("stage-out", dest, "--to", *url)
    assert (done.returncode, "link: neither a file" in one_line(done.stderr)) == (1, True)
    assert kept(dest, "--to", *url, "--skip-unsupported")["left_out"] == ["link"]
    assert run("unstage", dest).returncode == 0
    os.mkfifo(node.path / "upper/fifo")
    done = run("stage-out", "--upperdir", node.path / "upper", "--to", out)
    assert (done.returncode, "fifo: neither a file" in one_line(done.stderr)) == (1, True)
    assert not out.exists()
    assert kept("--upperdir", node.path / "upper", "--to", out, "--skip-unsupported")["left_out"] == ["fifo"]
    assert values(out) == {**WRITTEN, "link": BIG}
    assert os.readlink(out / "link") == "new/big"


def furnished(node: Node) -> Path:
    """Return a staged mount that also has a symbolic link, empty directories, and modes and times set by the job."""
    dest = job(node)
    (dest / "empty/inner").mkdir(parents=True)
    (dest / "new/big").chmod(0o750)
    (dest / "link").symlink_to("new/big")
    os.utime(dest / "link", ns=(5, 7_000_000_001), follow_symlinks=False)
    (dest / "empty/inner").chmod(0o2711)
    for path, time in (("new/big", 1_500_000_000_123_456_789), ("empty/inner", 9_000_000_003), ("new", -10**9 + 1)):
        os.utime(dest / path, ns=(time, time))
    return dest


@pytest.mark.parametrize("merged", [False, True])
def test_a_directory_keeps_modes_times_links_and_empty_directories(node: Node, merged: bool) -> None:
    dest, out = furnished(node), node.path / "deep/out"
    more = ["--merged"] if merged else []
    report = kept(dest, "--to", out, *more)
    assert (report["links"], report["empty_directories"]) == (1, [])
    found, there = snapshot(out), snapshot(dest)
    written = {"", "new", "new/big", "new/nämé", ".zattrs", "link", "empty", "empty/inner", "gzip"}
    expected = there if merged else {key: there[key] for key in written}
    assert found.keys() == expected.keys()
    assert {key: one for key, one in found.items() if key} == {key: one for key, one in expected.items() if key}
    assert not [name for name in os.listdir(out) if "zarrfs" in name]


def test_unchanged_files_are_not_copied_again(node: Node) -> None:
    dest, out = furnished(node), node.path / "out"
    assert kept(dest, "--to", out)["skipped"] == 0
    known = {path.name: path.stat().st_ino for path in (out / "new").iterdir()}
    assert kept(dest, "--to", out)["skipped"] == 3
    assert {path.name: path.stat().st_ino for path in (out / "new").iterdir()} == known
    os.utime(out / "new/big", (2_000_000_000, 2_000_000_000))  # newer than the source, but not its mtime
    (out / "new/big").chmod(0o600)
    (out / ".zattrs").chmod(0o600)
    (out / "new/nämé").write_text("other")
    (out / "other").write_text("stays")
    (out / "empty").chmod(0o700)
    assert kept(dest, "--to", out)["skipped"] == 0
    found, there = snapshot(out), snapshot(dest)
    assert {key: there[key] for key in found if key not in ("", "other")} == {
        key: one for key, one in found.items() if key not in ("", "other")
    }
    assert (out / "other").read_text() == "stays"


def test_links_that_are_there_are_not_followed(node: Node) -> None:
    dest, out, other = job(node), node.path / "out", node.path / "other"
    other.mkdir()
    out.mkdir()
    (out / "new").symlink_to(other)
    done = run("stage-out", dest, "--to", out)
    assert (done.returncode, "new: is there already, and is no directory" in one_line(done.stderr)) == (1, True)
    assert list(other.iterdir()) == []
    report = json.loads(run("stage-out", dest, "--to", out, "--keep-going", "--report", "-").stdout)
    assert {one["key"] for one in report["failed"]} == {"new"}
    assert (out / ".zattrs").read_text() == "{}"
