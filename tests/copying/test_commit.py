"""zarrfs commit: the new source has the merged tree, and a failed command leaves none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import kerchunk.df
import pytest
import trio
import zarr
from click.testing import CliRunner, Result

from tests.copying.mergedtrees import AFTER, SECOND, TARGET, TARGETS, Shown, changed, changed_source, opened, shown
from tests.sources.opening import open_source
from zarrfs.cli import main
from zarrfs.config.options import Options
from zarrfs.copying.commit import commit
from zarrfs.copying.commit_tree import MergedTree
from zarrfs.copying.commit_writers import NewSource
from zarrfs.errors import SourceError
from zarrfs.store.api import Kind, walk

# -- NEW shows the same tree as the overlay


NEW = [
    NewSource("new.json", "references"),
    NewSource("new.json.zst", "references", inline=0, relative=True),
    NewSource("archive.json.gz", "archive", inline=8),
]


def expected(merged: dict[str, Shown], form: str) -> dict[str, Any]:
    """Return the part of a merged tree that a source of this form can hold."""
    if form == "references":
        return {key: entry.data for key, entry in merged.items() if entry.kind is Kind.FILE}
    return {
        key: (entry.kind, entry.data, entry.mode, None if entry.mtime_ns is None else entry.mtime_ns // SECOND)
        for key, entry in merged.items()
    }


@pytest.mark.parametrize("kind", ["references", "archive", "zarr"])
def test_new_shows_the_merged_tree(kind: str, tmp_path: Path) -> None:
    source, blobs = changed_source(tmp_path, kind), tmp_path / "blobs"
    blobs.mkdir()

    async def check() -> None:
        overlay, plan = opened(source, tmp_path / "upper")
        merged = await shown(overlay)
        assert {key: entry.data for key, entry in merged.items()} == AFTER
        for new in NEW:
            told: list[str] = []
            path = str(tmp_path / new.path)
            await commit(overlay, plan, new._replace(path=path, blobs=str(blobs)), told.append, True)
            lost = ["empty: ", "link"] if new.format == "references" else []
            assert [name in text for name, text in zip(lost, told, strict=True)] == [True] * len(lost)
            store = open_source(path, Options(blobs=(str(blobs),), type=new.format), child=False)
            assert expected(await shown(store), new.format) == expected(merged, new.format)
            await store.aclose()
        await overlay.aclose()

    trio.run(check)
    left = {f"{new.path}{more}" for new in NEW for more in ("", ".data")}
    assert set(os.listdir(tmp_path)) <= {"source", *TARGETS, "upper", "blobs"} | left


# -- the command, one feature at a time


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a reference set and changes to it: one changed file, a new large one, and a new sparse one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").write_bytes(TARGET)
    refs = {".zgroup": '{"zarr_format":2}', "a/x": [str(tmp_path / "target"), 3, 100], "a/y": ["target"]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    upper = tmp_path / "up"
    upper.mkdir()
    changed(upper, tmp_path / "refs.json")
    (upper / "a").mkdir()
    (upper / "a/x").write_text("new")
    (upper / "large").write_bytes(b"0123456789" * 200_000)
    with open(upper / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"data")
    return tmp_path


def commit_to(new: str, *more: str) -> Result:
    return CliRunner().invoke(main, ["commit", "refs.json", "--upperdir", "up", "-O", new, *more])


def done(new: str, *more: str) -> None:
    result = commit_to(new, *more)
    assert (result.exit_code, result.output) == (0, "")


def refused(rule: str, new: str, *more: str, status: int = 1) -> None:
    """Assert that the command prints one line, with `rule` in it, and writes nothing."""
    before = sorted(os.listdir("."))
    result = commit_to(new, *more)
    assert result.exit_code == status
    assert rule in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(os.listdir(".")) == before


def entries_of(path: object) -> dict[str, Any]:
    """Return the set at `path`; a value is the bytes of an inline value, or [url, offset, length] or [url]."""
    store = open_source(str(path), Options(), child=False)
    found: dict[str, Any] = {}

    async def collect() -> None:
        async for key, info in walk(store):
            if info.kind is Kind.FILE:
                where = await store.locate(key, shown=False)
                found[key] = list(where.values()) if "url" in where else bytes(await store.get(key))
        await store.aclose()

    trio.run(collect)
    return found


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_unchanged_values_keep_their_references(place: Path) -> None:
    done("new.json")
    found = entries_of("new.json")
    data = str(place / "new.json.data")
    assert found["a/y"] == ["target"]
    assert found["a/x"] == b"new"
    assert (found["large"], found["sparse"]) == ([data, 0, 2_000_000], [data, 2_000_000, 64 << 20])
    assert allocated(place / "new.json.data") < 4 << 20


def test_a_relative_set_and_its_data_file_can_be_moved(place: Path) -> None:
    (place / "sub").mkdir()
    done("sub/new.json", "--relative")
    found = entries_of("sub/new.json")
    assert found["large"] == ["new.json.data", 0, 2_000_000]
    assert found["a/y"] == [str(place / "target")]
    os.rename("sub", "moved")
    assert trio.run(read, place / "moved/new.json", "large") == b"0123456789" * 200_000


async def read(path: Path, key: str) -> bytes:
    store = open_source(str(path), Options(), child=False)
    data = bytes(await store.get(key))
    await store.aclose()
    return data


def test_large_files_are_not_copied_with_in_place(place: Path) -> None:
    done("new.json", "--in-place")
    assert entries_of("new.json")["large"] == [f"file://{place}/up/large", 0, 2_000_000]
    assert not (place / "new.json.data").exists()
    os.rename("up/large", "up/a::b")
    done("other.json", "--in-place")
    assert trio.run(read, place / "other.json", "a::b") == b"0123456789" * 200_000


@pytest.mark.parametrize(
    ("view", "key", "kind"), [("arrays", "v.npy", "references"), ("netcdf", "refs.nc", "zarr")]
)
def test_files_that_a_view_makes_go_to_the_data_file(view: str, key: str, kind: str, place: Path) -> None:
    values = os.urandom(200_000)
    array = {
        "zarr_format": 2, "shape": [200_000], "chunks": [100_000], "dtype": "|u1", "compressor": None,
        "fill_value": 0, "order": "C", "filters": None,
    }  # fmt: skip
    refs = {
        ".zgroup": '{"zarr_format":2}', "v/.zarray": json.dumps(array), "v/.zattrs": '{"_ARRAY_DIMENSIONS": ["x"]}',
        "v/0": ["values", 0, 100_000], "v/1": ["values", 100_000, 100_000],
    }  # fmt: skip
    (place / "values").write_bytes(values)
    source = place / "refs.json"
    source.write_text(json.dumps({"version": 1, "refs": refs}))
    if kind == "zarr":
        assert CliRunner().invoke(main, ["copy", "refs.json", "refs.zarr"]).exit_code == 0
        source = place / "refs.zarr"
    (place / "up2").mkdir()
    arguments = ["commit", str(source), "--upperdir", "up2", "-O", "new.json", "-o", f"view={view}"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.output) == (0, "")
    url, start, length = entries_of("new.json")[key]
    assert url == str(place / "new.json.data")
    assert (place / "new.json").stat().st_size < 10_000

    async def shown_by_view() -> bytes:
        store = open_source(str(source), Options(view=view), child=False)
        data = bytes(await store.get(key))
        await store.aclose()
        return data

    assert (place / "new.json.data").read_bytes()[start : start + length] == trio.run(shown_by_view)
    assert values in (place / "new.json.data").read_bytes()


def test_a_sparse_file_stays_sparse(place: Path) -> None:
    (place / "blobs").mkdir()
    done("new.json", "--format", "archive", "--blobs", "blobs")
    (entry,) = [entry for entry in json.loads((place / "new.json").read_text()) if entry["path"] == "sparse"]
    assert entry["size"] == 64 << 20
    assert [region[:2] for region in entry["data"]] == [[32 << 20, 4096]]


def test_entries_that_the_format_cannot_hold_are_an_error_or_left_out(place: Path) -> None:
    (place / "up" / os.fsdecode(b"\xff")).write_text("x")
    refused("not UTF-8", "new.json")
    (place / "up" / os.fsdecode(b"\xff")).unlink()
    os.mkfifo("up/fifo")
    os.symlink("large", "up/link")
    refused("up: fifo: is a FIFO", "new.json")
    os.unlink("up/fifo")
    refused("up: link: a symbolic link, which no reference set can hold", "new.json")
    os.mkfifo("up/fifo")
    result = commit_to("new.json", "--skip-unsupported")
    assert result.exit_code == 1, "something was left out"
    assert [line.split(": ")[3] for line in result.stderr.splitlines()] == ["fifo", "link"]
    names = CliRunner().invoke(main, ["ls", "new.json"]).output.split()
    assert names == [".zgroup", "a", "large", "sparse"]


def test_an_empty_directory_that_is_left_out_is_no_success(place: Path) -> None:
    os.mkdir("up/empty")
    result = commit_to("new.json")
    assert (result.exit_code, result.stderr.count("\n"), "empty: " in result.stderr) == (1, 1, True)
    assert entries_of("new.json")["a/x"] == b"new"


def test_an_entry_that_is_left_out_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = {"shape": [1], "chunks": [1], "dtype": "|u1", "compressor": {"id": "nosuch"}, "filters": None,
             "fill_value": 0, "order": "C", "zarr_format": 2}  # fmt: skip
    refs = {".zgroup": '{"zarr_format": 2}', "odd/.zarray": json.dumps(array), "odd/0": "x", "bad/../entry": "x"}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    (tmp_path / "up").mkdir()
    result = commit_to("new.json", "--format", "archive", "-o", "view=v3")
    assert (result.exit_code, "odd: " in result.stderr, "bad/../entry: " in result.stderr) == (1, True, True)


@pytest.mark.parametrize("form", ["references", "archive"])
def test_bad_references_of_the_source(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are an error, or left out; not if the upper directory hides or replaces them."""
    monkeypatch.chdir(tmp_path)
    refs = {"bad": ["u", -5, 10], "d/gone": ["u", -5, 10], "d/new": ["u", -5, 10], "good": "x"}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    (tmp_path / "up").mkdir()
    changed(tmp_path / "up", tmp_path / "refs.json")
    (tmp_path / "up/d").mkdir()
    (tmp_path / "up/d/.wh.gone").touch()
    (tmp_path / "up/d/new").write_text("new")
    result = commit_to("new.json", "--format", form)
    assert result.exit_code == 1
    assert "refs.json: bad: offset: negative (--skip-unsupported" in result.stderr
    assert not os.path.exists("new.json")
    result = commit_to("new.json", "--format", form, "--skip-unsupported")
    left_out = [line for line in result.stderr.splitlines() if line.endswith(": left out")]
    assert (result.exit_code, len(left_out), "bad: offset" in left_out[0]) == (1, 1, True)
    assert run_ls("new.json") == ["d", "good"]
    (tmp_path / "up/.wh.bad").touch()
    assert commit_to("new.json", "--format", form, "--force").exit_code == 0
    assert run_ls("new.json") == ["d", "good"]


def run_ls(path: str) -> list[str]:
    return CliRunner().invoke(main, ["ls", path]).stdout.split()


def test_an_existing_output_is_replaced_only_with_force(place: Path) -> None:
    done("new.json")
    refused("--force", "new.json", status=2)
    (place / "up/large").write_bytes(b"later" * 1000)
    done("new.json", "--force")
    assert trio.run(read, place / "new.json", "large") == b"later" * 1000
    assert (place / "new.json.data").read_bytes()[:10] == b"0123456789", "what the old set refers to"
    assert entries_of("new.json")["large"][0] == str(place / "new.json.2.data")


def test_new_may_not_be_in_the_source_or_the_upper_directory(place: Path) -> None:
    (place / "blobs").mkdir()
    refused("is the upper directory", "up/new.json", status=2)
    refused("is the source", "refs.json", "--force", status=2)
    (place / "link").symlink_to("up")
    refused("is the upper directory", "link/sub/../new.json", status=2)
    refused("is the upper directory", "a.json", "--format", "archive", "--blobs", "up/a", status=2)
    refused("its name has no known ending", "new", status=2)
    refused("zarrfs copy", "new.zarr", status=2)
    refused("no such directory", "none/new.json", status=2)


def test_an_upper_directory_in_use_is_refused(place: Path) -> None:
    overlay, _plan = opened(place / "refs.json", place / "up")
    overlay.upper.lock(True)
    refused(f"up: is in use by another mount or program (process {os.getpid()})", "new.json")
    trio.run(overlay.aclose)
    done("new.json")


def test_an_archive_with_a_large_file_needs_a_directory_of_blobs(place: Path) -> None:
    refused("large: 2,000,000 bytes, which go to a blob", "new.json", "--format", "archive", status=2)
    refused("--blobs flux:: blobs are written to", "new.json", "--format", "archive", "--blobs", "flux:", status=2)
    done("new.json", "--format", "archive", "--blobs", f"file://{place}")
    assert list(place.glob("sha1-*"))


def test_an_unreadable_value_leaves_no_output(place: Path) -> None:
    (place / "archive.json").write_text(
        json.dumps([{"path": "z", "mode": 0o100644, "size": 5000, "encoding": "blobvec",
                     "data": [[0, 5000, "sha1-" + "0" * 40]]}])
    )  # fmt: skip
    (place / "up/.zarrfs-upper").unlink()
    upper = {path.name: path for path in (place / "up").iterdir()}
    (place / "other").mkdir()
    changed(place / "other", place / "archive.json")
    for name, path in upper.items():
        path.rename(place / "other" / name)
    before = sorted(os.listdir("."))
    arguments = ["commit", "archive.json", "-q", "--upperdir", "other", "--format", "references", "-O", "new.json"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"zarrfs: {place}/archive.json: z: ")
    assert sorted(os.listdir(".")) == before


def test_a_file_that_has_changed_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    """The copy of it would be cut at its old size."""
    for name in ("source", "upper"):
        (tmp_path / name).mkdir()
    (tmp_path / "source/.zgroup").write_text('{"zarr_format": 2}')
    (tmp_path / "source/lower").write_bytes(b"value")
    changed(tmp_path / "upper", tmp_path / "source")
    (tmp_path / "upper/upper").write_bytes(b"value")
    (tmp_path / "upper/empty").touch()

    async def main() -> None:
        overlay, _plan = opened(tmp_path / "source", tmp_path / "upper")
        tree = MergedTree(overlay, "source", print)
        nodes = {node.key: node async for node in tree.nodes(lambda node: None)}
        for key, path in (("lower", tmp_path / "source/lower"), ("upper", tmp_path / "upper/upper")):
            assert await tree.read(nodes[key], 0, 5) == b"value"
            (tmp_path / "new").write_bytes(b"longer value")
            os.replace(tmp_path / "new", path)
            with pytest.raises(SourceError, match=f"{key}: changed while it was read"):
                await tree.read(nodes[key], 0, 5)
        (tmp_path / "upper/empty").write_bytes(b"value")
        with pytest.raises(SourceError, match="empty: changed while it was read"):
            await tree.extents(nodes["empty"], 0)
        tree.close()
        await overlay.aclose()

    trio.run(main)


# -- sources and sets of other kinds


def array(place: Path) -> None:
    """Write arr.parquet, a Parquet reference set of an array with three chunks, and changes to it in up2."""
    zarray = {"zarr_format": 2, "shape": [6], "chunks": [2], "dtype": "<u2", "compressor": None, "fill_value": 7,
              "order": "C", "filters": None}  # fmt: skip
    refs = {".zgroup": '{"zarr_format":2}', "v/.zarray": json.dumps(zarray), "v/.zattrs": "{}"}
    refs |= {f"v/{number}": [str(place / "target"), 4 * number, 4] for number in range(3)}  # type: ignore[misc]
    kerchunk.df.refs_to_dataframe(refs, str(place / "arr.parquet"), record_size=100)
    (place / "up2").mkdir()
    changed(place / "up2", place / "arr.parquet")
    (place / "up2/v").mkdir()
    (place / "up2/v/.wh.1").touch()
    (place / "up2/v/2").write_bytes(b"\1\0\2\0")
    (place / "up2/v/.zattrs").write_text('{"units": "K"}')


@pytest.mark.parametrize("inline", ["1KiB", "0"])
def test_a_parquet_set_is_committed(place: Path, inline: str) -> None:
    array(place)
    new = "new.json"
    arguments = ["commit", "arr.parquet", "--upperdir", "up2", "-O", new, "--inline-threshold", inline]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.output) == (0, "")
    found = entries_of(new)
    assert found["v/0"] == [str(place / "target"), 0, 4]
    assert "v/1" not in found
    assert found["v/2"] == (b"\1\0\2\0" if inline == "1KiB" else [str(place / f"{new}.data"), 0, 4])
    assert json.loads(found["v/.zattrs"]) == {"units": "K"}
    fs = fsspec.filesystem("reference", fo=str(place / new), remote_protocol="file", skip_instance_cache=True)
    group = zarr.open_group(fs.get_mapper(""), mode="r", zarr_format=2, use_consolidated=False)
    assert group["v"][:].tolist() == [0x0100, 0x0302, 7, 7, 1, 2]
    assert group["v"].attrs["units"] == "K"


def test_a_store_that_is_its_own_upper_has_no_difference(place: Path) -> None:
    (place / "new.zarr").mkdir()
    (place / "new.zarr/.zgroup").write_text('{"zarr_format": 2}')
    for command in (["commit", "-O", "other.json"], ["diff"]):
        result = CliRunner().invoke(main, [*command, "new.zarr", "--upperdir", "new.zarr"])
        assert result.exit_code == 2
        assert "is the source itself" in result.stderr


def test_keys_with_names_reserved_in_an_upper_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "up").mkdir()
    refs = dict.fromkeys(("x", ".wh.y", ".zarrfs-upper", "sub/.wh.z", "sub/w", ".wh.d/v"), "data")
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    done("odd.json")
    assert sorted(entries_of("odd.json")) == ["sub/w", "x"]
