"""zarrfs refs from-store: the reference set made from a store contains the same files."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import trio
import zarr
from click.testing import CliRunner

from tests.conftest import PROGRAM, run
from tests.copying.mergedtrees import opened
from tests.icechunk.repositories import write_virtual
from tests.references.refsets import as_fsspec_reads, done, entries, refs
from tests.servers import S3, Nginx, Sftp
from zarrfs.cli import main

METADATA = {".zgroup", ".zarray", ".zattrs", ".zmetadata", "zarr.json"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a Zarr store with unusual names."""
    place = tmp_path / "störe {{x}}.zarr"
    group = zarr.open_group(str(place), mode="w", zarr_format=2)
    group.create_array("x/y", data=np.arange(100), chunks=(30,))
    (place / "notes").mkdir()
    for name, data in {"a b%20c": b"1" * 50, "hh::i": b"2" * 5000, "empty": b"", "é{{": b"\xff\0" * 9}.items():
        (place / "notes" / name).write_bytes(data)
    return place


def files(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def shown(path: Path | str, *options: str) -> dict[str, bytes]:
    """Return every file of the source at `path`, read with zarrfs ls and zarrfs cat in this process."""

    def command(*arguments: object) -> bytes:
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == 0, result.stderr
        return result.stdout_bytes

    lines = command("ls", "-R", "--json", path, *options).splitlines()
    sizes = {entry["key"]: entry["size"] for entry in map(json.loads, lines) if entry["kind"] == "file"}
    data = command("cat", path, *options, *sizes)
    assert len(data) == sum(sizes.values())
    stream = io.BytesIO(data)
    return {key: stream.read(size) for key, size in sizes.items()}


@pytest.mark.parametrize("name", ["year=2020.zarr", "my store.zarr", "100%25.zarr"])
@pytest.mark.parametrize("relative", [True, False])
def test_chunks_of_shards_in_directories_of_unusual_names(tmp_path: Path, name: str, relative: bool) -> None:
    group = zarr.open_group(str(tmp_path / name), mode="w")
    group.create_array("a", shape=(100,), chunks=(10,), shards=(50,), dtype="i4", compressors=None)[:] = np.arange(100)
    options = ["--relative"] if relative else []
    done("from-store", tmp_path / name, "-O", tmp_path / "set.json", *options, "--view", "v2")
    expected = shown(tmp_path / name, "-o", "view=v2")
    assert len(expected) > 10
    assert shown(tmp_path / "set.json") == expected


def test_the_set_shows_the_same_tree(tree: Path, tmp_path: Path) -> None:
    done("from-store", tree, "-O", tmp_path / "set.json")
    found = entries(tmp_path / "set.json")
    for key, data in files(tree).items():
        inline = not data or Path(key).name in METADATA
        assert found[key] == (data if inline else [f"{tree}/{key}", 0, len(data)])
    assert shown(tmp_path / "set.json") == files(tree)
    assert as_fsspec_reads(tmp_path / "set.json") == files(tree)
    fs = fsspec.filesystem("reference", fo=str(tmp_path / "set.json"), remote_protocol="file")
    assert zarr.open_group(fs.get_mapper(""), mode="r", zarr_format=2)["x/y"][:].tolist() == list(range(100))


def test_a_set_with_relative_urls_can_be_moved_with_its_tree(tree: Path, tmp_path: Path) -> None:
    expected = files(tree)
    (tmp_path / "sets").mkdir()
    done("from-store", tree, "--relative", "-O", tmp_path / "sets" / "set.json")
    assert entries(tmp_path / "sets" / "set.json")["notes/hh::i"] == [f"../{tree.name}/notes/hh::i", 0, 5000]
    done("from-store", tree, "--relative", "-O", tree / "notes" / "set.json")
    assert entries(tree / "notes" / "set.json")["notes/hh::i"] == ["./hh::i", 0, 5000]
    (tree / "notes" / "set.json").unlink()
    (tmp_path / "moved").mkdir()
    for name in ("sets", tree.name):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert shown(tmp_path / "moved" / "sets" / "set.json") == expected


def test_files_up_to_the_given_size_are_inline(tree: Path, tmp_path: Path) -> None:
    done("from-store", tree, "--inline", "50B", "-O", tmp_path / "set.json")
    found = entries(tmp_path / "set.json")
    assert found["notes/a b%20c"] == b"1" * 50
    assert found["notes/hh::i"] == [f"{tree}/notes/hh::i", 0, 5000]
    assert refs("from-store", tree, "--inline", "5 bytes").exit_code == 2


@pytest.mark.parametrize(("kind", "view"), [("zarr", None), ("zarr", "v3"), ("references", "v3")])
def test_changes_in_an_upper_directory(kind: str, view: str | None, tmp_path: Path) -> None:
    """References to changed files point into the upper directory, all others to the source."""
    source, upper = tmp_path / "x.zarr", tmp_path / "changes %20"
    group = zarr.open_group(str(source), mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(6, dtype="<i4"), chunks=(2,), compressors=None)
    if kind == "references":
        done("from-store", source, "-O", tmp_path / "x.json")
        source = tmp_path / "x.json"
    upper.mkdir()
    overlay, _plan = opened(source, upper, **{} if view is None else {"view": view})
    overlay.upper.lock(True)

    async def change() -> None:
        await overlay.set("x/0", b"changed!")
        await overlay.aclose()

    trio.run(change)
    options = ["--upperdir", str(upper), *([] if view is None else ["--view", view])]
    done("from-store", source, *options, "-O", tmp_path / "new.json")
    found = entries(tmp_path / "new.json")
    assert found["x/0"] == [f"{upper}/x/0", 0, 8]
    assert found["x/1"] == [f"{tmp_path}/x.zarr/x/1", 0, 8]
    merged = shown(source, *options)
    assert merged["x/0"] == b"changed!"
    assert shown(tmp_path / "new.json") == merged


def test_a_store_on_a_web_server(nginx: Nginx, tree: Path, tmp_path: Path) -> None:
    place = nginx.listing.root / "from" / "störe.zarr"
    shutil.copytree(tree, place)
    url = f"{nginx.listing.url}/from/st%C3%B6re.zarr"
    done("from-store", url, "-O", tmp_path / "set.json")
    assert entries(tmp_path / "set.json")["x/y/0"][0] == f"{url}/x/y/0"
    assert shown(tmp_path / "set.json") == files(tree)
    unlisted = refs("from-store", f"{nginx.plain.url}/from/st%C3%B6re.zarr")
    assert unlisted.exit_code == 1
    assert "no listings" in unlisted.stderr
    assert refs("from-store", url, "--relative", "-O", tmp_path / "x.json").exit_code == 2


def test_a_store_in_a_bucket_and_in_a_zip_file(s3: S3, tree: Path, tmp_path: Path) -> None:
    for key, data in files(tree).items():
        s3.client.put_object(Bucket=s3.bucket, Key=f"from.zarr/{key}", Body=data)
    options = [f"--option=s3.{name}={value}" for name, value in s3.options.items()]
    url = f"s3://{s3.bucket}/from.zarr"
    result = run("refs", "from-store", url, "-O", tmp_path / "s3.json", *options)
    assert (result.returncode, 'hh::i: a name with "::"' in result.stderr) == (1, True)
    s3.client.delete_object(Bucket=s3.bucket, Key="from.zarr/notes/hh::i")
    (tree / "notes" / "hh::i").unlink()
    assert run("refs", "from-store", url, "-O", tmp_path / "s3.json", *options).returncode == 0
    assert shown(tmp_path / "s3.json", *options) == files(tree)
    with zipfile.ZipFile(tmp_path / "store.zip", "w") as archive:
        for key, data in files(tree).items():
            archive.writestr(key, data)
    done("from-store", f"zip://::file://{tmp_path}/store.zip", "-O", tmp_path / "zip.json")
    assert shown(tmp_path / "zip.json") == files(tree)


def test_a_store_behind_sftp(sftp: Sftp, tmp_path: Path) -> None:
    place, url = sftp.root / "from.zarr", f"{sftp.url}/from.zarr"
    zarr.open_group(str(place), mode="w", zarr_format=2).create_array("x", data=np.arange(4), chunks=(2,))
    options = [f"--option=sftp.{one}" for one in ("username=somebody", "password=secret", "known_hosts=null")]
    result = refs("from-store", url, "-O", tmp_path / "set.json", *options)
    assert result.exit_code == 0, result.stderr
    assert entries(tmp_path / "set.json")["x/0"][0] == f"{url}/x/0"
    assert shown(tmp_path / "set.json", *options) == files(place)
    (place / "x/a?b").write_bytes(b"1")
    result = refs("from-store", url, "-O", tmp_path / "other.json", *options)
    assert result.exit_code == 0, result.stderr
    assert shown(tmp_path / "other.json", *options) == files(place)


@pytest.mark.parametrize("where", ["local", "s3", "zip"])
def test_names_that_look_like_url_queries_or_fragments_are_kept(where: str, s3: S3, tmp_path: Path) -> None:
    place = tmp_path / "marks.zarr"
    zarr.open_group(str(place), mode="w", zarr_format=2).create_array("ch#signal", data=np.arange(4), chunks=(2,))
    (place / "a?token=1").write_bytes(b"1" * 9)
    url, options = f"local://{place}", []
    if where == "s3":
        for key, data in files(place).items():
            s3.client.put_object(Bucket=s3.bucket, Key=f"marks.zarr/{key}", Body=data)
        url = f"s3://{s3.bucket}/marks.zarr"
        options = [f"--option=s3.{name}={value}" for name, value in s3.options.items()]
    elif where == "zip":
        with zipfile.ZipFile(tmp_path / "store.zip", "w") as archive:
            for key, data in files(place).items():
                archive.writestr(key, data)
        url = f"zip://::{tmp_path}/store.zip"
    result = refs("from-store", url, "-O", tmp_path / "set.json", *options)
    assert result.exit_code == 0, result.stderr
    assert shown(tmp_path / "set.json", *options) == files(place)


@pytest.mark.parametrize("form", ["json", "parq"])
def test_a_view_does_not_change_the_urls_of_targets(form: str, tmp_path: Path) -> None:
    """An HTTP query stays, as it may select the bytes; in an S3 key or a path, "#" is part of the name."""
    zarray = {"zarr_format": 2, "shape": [3], "chunks": [1], "dtype": "<f8", "order": "C", "fill_value": 0,
              "compressor": None, "filters": None}  # fmt: skip
    targets = ["https://u:p@host/get?file=a&token=T", "s3://bucket/ch#signal/0", "ch#signal/1"]
    chunks = {f"x/{number}": [url, 0, 8] for number, url in enumerate(targets)}
    (tmp_path / "set.json").write_text(json.dumps({".zgroup": '{"zarr_format":2}', "x/.zarray": zarray, **chunks}))
    if form == "parq":
        done("convert", tmp_path / "set.json", tmp_path / "set.parq")
    done("from-store", "--view", "v3", tmp_path / f"set.{form}", "-O", tmp_path / "v3.json")
    found = entries(tmp_path / "v3.json")
    assert [found[key] for key in chunks] == [[url, 0, 8] for url in (*targets[:2], f"{tmp_path}/{targets[2]}")]


@pytest.mark.parametrize(
    ("make", "entry", "rule"),
    [
        (lambda place: os.symlink("nowhere", place / "link"), "link", "to nowhere, which is not there"),
        (lambda place: (place / os.fsdecode(b"n\xff")).write_bytes(b"1"), "n", "not UTF-8"),
        (lambda place: (place / "dir").mkdir() or (place / "dir" / os.fsdecode(b"\xfe")).mkdir(), "dir/", "not UTF-8"),
        (
            lambda place: [(place / "/".join("d" * 101)).mkdir(parents=True), (place / ("d/" * 101) / "f").touch()],
            "d/d/", "over 100 directories deep, which no reference set can hold",
        ),
    ],
)
def test_files_that_no_set_can_hold(make: object, entry: str, rule: str, tree: Path, tmp_path: Path) -> None:
    assert callable(make)
    make(tree)
    result = refs("from-store", tree, "-O", tmp_path / "set.json")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"zarrfs: {tree}: {entry}")
    assert rule in result.stderr
    assert not (tmp_path / "set.json").exists()


@pytest.mark.parametrize("location", ["vcc://archive/numbers.bin", "s3://bucket/dat%FF.bin"])
def test_virtual_chunks_of_icechunk_that_no_reference_can_name(location: str, tmp_path: Path) -> None:
    write_virtual(tmp_path / "repo", location, "1")
    result = refs("from-store", tmp_path / "repo", "--option", "type=icechunk", "-O", tmp_path / "set.json")
    assert (result.exit_code, (tmp_path / "set.json").exists()) == (1, False)
    what = f"virtual/c/0: a virtual chunk at {location}, a location that no reference can name"
    assert what in result.stderr


@pytest.mark.parametrize("locked", ["notes/hh::i", "notes", "x/y/.zarray"])
def test_unreadable_files_and_directories(locked: str, tree: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root reads everything")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    (tree / locked).chmod(0)
    others = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"] if os.geteuid() == 0 else []
    result = subprocess.run(
        [*others, PROGRAM, "refs", "from-store", str(tree)], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"zarrfs: {tree}: {locked}: ")
    assert "ermission denied" in result.stderr


def test_a_document_is_refused_as_a_store(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{"a": "b"}')
    result = refs("from-store", tmp_path / "set.json")
    assert result.exit_code == 1
    assert "a Zarr store is a directory" in result.stderr


@pytest.mark.parametrize("name", ["set.json", "sub/set.index", "set.parq", "stdout"])
def test_the_output_is_not_part_of_the_tree(name: str, tmp_path: Path) -> None:
    """The output is written inside the source tree; neither it nor the file it replaces becomes an entry."""
    tree = tmp_path / "tree"
    for array in "x", "z/y":
        zarr.create_array(str(tree / array), data=np.arange(9), chunks=(3,), zarr_format=2)
    if name != "set.parq":
        (tree / "sub" / "set.json").mkdir(parents=True)
        (tree / "sub" / "set.json" / "kept").write_bytes(b"1")
    expected = files(tree)
    (tmp_path / "link").symlink_to(tree)
    places = [".", tree, f"local://{tree}", tmp_path / "link"]
    for place in places if name == "set.json" else places[-2:]:
        command = ["refs", "from-store", place]
        if name == "stdout":
            subprocess.run(["sh", "-c", '"$0" "$@" > sub/stdout', PROGRAM, *command], cwd=tree, check=True)
        else:
            result = run(*command, "--force", "-O", name, cwd=tree)
            assert result.returncode == 0, result.stderr
        found = entries(tree / ("sub/stdout" if name == "stdout" else name))
        found.pop(".zmetadata", None)
        assert sorted(found) == sorted(expected)


def test_the_output_must_not_be_the_source(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text('{".zgroup": "{}"}')
    done("convert", tmp_path / "set.json", tmp_path / "set.parq")
    result = refs("from-store", tmp_path / "set.parq", "--force", "-O", tmp_path / "set.parq")
    assert result.exit_code == 2
    assert "is also the output" in result.stderr
    assert os.listdir(tmp_path / "set.parq") == [".zmetadata"]


@pytest.mark.parametrize("output", ["-", "{}/out.json", "{}/out.index", "{}/out.parq"])
def test_a_path_that_is_not_utf8(output: str, tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"d\xff")
    zarr.create_array(str(place / "x"), data=np.arange(9), chunks=(3,), zarr_format=2)
    command = [PROGRAM, "refs", "from-store", place, "-O", output.format(tmp_path)]
    result = subprocess.run(command, capture_output=True)
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert b"x/0: its path is not UTF-8, which a URL cannot hold" in result.stderr
    assert os.listdir(tmp_path) == [place.name]


def test_relative_urls_in_a_directory_that_is_not_utf8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"d\xff")
    zarr.create_array(str(place / "x"), data=np.arange(9), chunks=(3,), zarr_format=2)
    subprocess.run([PROGRAM, "refs", "from-store", ".", "--relative", "-O", "set.json"], cwd=place, check=True)
    assert entries(place / "set.json")["x/0"][0] == "x/0"
    elsewhere = subprocess.run([PROGRAM, "refs", "convert", "set.json", "-"], cwd=place, capture_output=True)
    assert elsewhere.returncode == 1
    assert b"its path is not UTF-8, which a URL cannot hold" in elsewhere.stderr
    for command in ["refs", "convert", "set.json", "new.index"], ["index", "set.json", "-O", "new.index"]:
        result = subprocess.run([PROGRAM, *command], cwd=place, capture_output=True)
        assert result.returncode == 1
        assert b"not UTF-8" in result.stderr
        assert b"internal" not in result.stderr
