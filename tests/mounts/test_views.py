"""Mounts with view=v2 and view=v3: current zarr-python reads from each sample store what its writer read from it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import run
from tests.mounts.mounting import log_of, mounted, until
from tests.mounts.refreshing import refresh
from tests.zarrsamples import DRAFT, ROOT, SAMPLES, Sample

VERSIONS = 2, 3
VERSIONS_OF = {"v2": 2, "v3": 3}
UNDEFINED = "v0_bytes48_08", "v0_datetime64_s_010", "v1_bytes48_08"  # no fill value, and unwritten chunks
BLOSC = ("v0_pickled_snappy", "v1_float64_05", "v1_float64_15", "v1_zstd_stored_split")
FAILS = {  # by version: errors of zarr-python, for codecs that it does not have, and filters that its v3 would misread
    2: {
        **dict.fromkeys(BLOSC, "error during blosc decompression"),
        **dict.fromkeys(("v2_odd-json_of_numbers", "v2_odd-json_of_text"), "codec not available"),
        **dict.fromkeys(("v2_odd-bytes_as_objects", "v2_odd-text_as_objects"), "No Zarr data type found that matches"),
        "v2_odd-labels_of_bytes": "only unicode ('U') and object ('O') dtypes are supported",
    },
    3: {
        **dict.fromkeys(BLOSC, "error during blosc decompression"),
        **{f"v2_odd-{name}": "left out" for name in (
            "json_of_numbers", "json_of_text", "labels_of_bytes", "filter_of_wider_items",
        )},
    },
}  # fmt: skip
ODD = "0xfff8000000000001"  # a NaN
LATER = 2_000_000_000  # seconds since 1970


@pytest.fixture(scope="module", params=VERSIONS)
def view(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Mount all sample stores as one hierarchy; yield the hierarchy's Zarr version and the mount point."""
    place = tmp_path_factory.mktemp("samples")
    with mounted(ROOT, place / "mnt", f"view=v{request.param}") as mountpoint:
        yield request.param, mountpoint


def opened(version: int, path: Path) -> zarr.Array[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about data types and codecs that are not in the v3 specification
        return zarr.open_array(str(path), mode="r", zarr_format=version)  # type: ignore[arg-type]


def digest(values: Any, dtype: str | list[Any]) -> str:
    found = np.asarray(values)
    if isinstance(dtype, str) and not dtype.startswith("|V"):  # structured types are recorded as bytes
        found = found.astype(dtype)
    return hashlib.sha256(found.tobytes("C")).hexdigest()


def read(version: int, mountpoint: Path, sample: Sample) -> str:
    """Read a sample through a view; return "equal", or why it is not equal."""
    path = mountpoint / sample.store.name / sample.path
    if not any((path / name).exists() for name in ("zarr.json", ".zarray")):
        return "left out"
    try:
        array = opened(version, path)
        found = digest(array[...], sample.dtype)
    except (RuntimeError, TypeError, ValueError) as exc:
        return str(exc).partition(":")[0].partition(" {")[0]
    assert array.shape == sample.shape
    if sample.label in UNDEFINED:
        return "undefined"
    assert found == sample.sha256, sample.label
    if sample.attributes is not None:
        assert dict(array.attrs) == sample.attributes
    return "equal"


def test_every_sample_array_is_equal_to_what_its_writer_read(view: tuple[int, Path]) -> None:
    version, mountpoint = view
    found = {sample.label: read(version, mountpoint, sample) for sample in SAMPLES}
    not_equal = {label: what for label, what in found.items() if what != "equal"}
    assert not_equal == {**dict.fromkeys(UNDEFINED, "undefined"), **FAILS[version]}
    assert len(found) >= 75


def test_documents_of_v3_are_passed_on_as_they_are(tmp_path: Path) -> None:
    store = shutil.copytree(ROOT / "v3_hier", tmp_path / "store")
    about = json.loads((store / "raw/zarr.json").read_text())
    written = {
        "": {"zarr_format": 3, "node_type": "group", "hint": {"must_understand": False}, "attributes": {"x": 1e30}},
        "raw": {**about, "hint": {"must_understand": False, "a": [1, None]}, "attributes": {"none": float("nan")}},
        "keys": {**about, "chunk_key_encoding": {"name": "suffix", "configuration": {"suffix": ".x"}}, "hint":
                 {"must_understand": False}},
    }  # fmt: skip
    for name, document in written.items():
        (store / name).mkdir(exist_ok=True)
        (store / name / "zarr.json").write_text(json.dumps(document, separators=(" ,", ":  ")))
    (store / "keys/c/0").mkdir(parents=True)
    shutil.copyfile(store / "raw/c/0/0", store / "keys/c/0/0.x")
    with mounted(store, tmp_path / "mnt", "view=v3") as mountpoint:
        documents = {path.relative_to(store) for path in store.rglob("zarr.json")}
        changed = {str(path) for path in documents if (store / path).read_bytes() != (mountpoint / path).read_bytes()}
        assert changed == {"keys/zarr.json"}  # no reader of today knows its keys
        shown = json.loads((mountpoint / "keys/zarr.json").read_text())
        assert shown["hint"] == {"must_understand": False}
        assert np.array_equal(opened(3, mountpoint / "keys")[:6], opened(3, store / "raw")[:6])


def with_odd(place: Path) -> Path:
    """Create a v3 store with an array `odd` whose fill value v2 cannot express."""
    store = shutil.copytree(ROOT / "v3_hier", place / "store")
    about = json.loads((store / "raw/zarr.json").read_text())
    (store / "odd").mkdir()
    (store / "odd/zarr.json").write_text(json.dumps(about | {"data_type": "float64", "fill_value": ODD}))
    return store


def test_nodes_left_out_of_a_view_are_in_an_attribute(tmp_path: Path) -> None:
    with mounted(with_odd(tmp_path), tmp_path / "mnt", "view=v2") as mountpoint:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            names = set(zarr.open_group(str(mountpoint), mode="r", use_consolidated=False).array_keys())
        assert "raw" in names
        assert "odd" not in names
        assert any("odd" in str(warning.message) for warning in told)
        reasons = json.loads(os.getxattr(mountpoint / "odd", "user.zarrfs.left_out"))
        why = "a NaN with a sign or bits of its own, which Zarr v2 does not have"
        assert reasons == {"odd": f"fill_value: {ODD}, {why}"}
        assert json.loads(os.getxattr(mountpoint, "user.zarrfs.left_out")) == reasons
        assert "user.zarrfs.left_out" in os.listxattr(mountpoint / "odd")
        with pytest.raises(OSError, match="No data"):
            os.getxattr(mountpoint / "raw", "user.zarrfs.left_out")
        assert os.listdir(mountpoint / "odd") == []
    told_of = [line for line in log_of(mountpoint).splitlines() if "left out" in line]
    assert len(told_of) == 1
    assert "odd: left out of view=v2: fill_value" in told_of[0]


def test_a_view_is_writable_only_with_an_upper_directory(tmp_path: Path) -> None:
    for name in "mnt", "upper":
        (tmp_path / name).mkdir()
    done = run("mount", ROOT / "v2_hier", tmp_path / "mnt", "-o", "rw,view=v3")
    assert done.returncode == 2
    assert "option view: views are read-only; with upperdir=DIR changes are stored in DIR" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "v2_hier").rglob("*")}
    with mounted(ROOT / "v2_hier", tmp_path / "mnt", "view=v3", f"upperdir={tmp_path}/upper") as mountpoint:
        group = zarr.open_group(str(mountpoint), mode="r+", zarr_format=3, use_consolidated=False)
        raw = group["raw"]
        assert isinstance(raw, zarr.Array)
        raw[:6] = 7
        group.create_array("new", data=np.arange(5))
        os.unlink(mountpoint / "zstd/0.0.0")
    with mounted(ROOT / "v2_hier", tmp_path / "mnt", "view=v3", f"upperdir={tmp_path}/upper", "ro") as mountpoint:
        group = zarr.open_group(str(mountpoint), mode="r", zarr_format=3, use_consolidated=False)
        assert np.asarray(group["new"][:]).tolist() == [0, 1, 2, 3, 4]  # type: ignore[index]
        assert (np.asarray(group["raw"][:6]) == 7).all()  # type: ignore[index]
        assert not (mountpoint / "zstd/0.0.0").exists()
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "v2_hier").rglob("*")} == before


BROKEN = {  # documents that break a rule, and an entry that cannot be read
    "raw/.zarray": '{"zarr_format": 2, "shape": [-1]}', "raw/.zattrs": "[]", ".zattrs": "{", ".zgroup": "1",
    "raw": None, "raw/zarr.json": '{"zarr_format": 3, "node_ty',
}  # fmt: skip
FILES = {"v3": ("zarr.json",), "v2": (".zarray",), "arrays": (".npy", ".json")}


def broken(store: Path, document: str) -> None:
    """Copy a store of v2, and break one of its documents."""
    shutil.copytree(ROOT / "v2_hier", store)
    if (text := BROKEN[document]) is None:
        shutil.rmtree(store / "raw")
        (store / "raw").symlink_to("nowhere")
    else:
        (store / document).write_text(text)


def assert_bad(bad: list[Path], mountpoint: Path, *parts: str) -> None:
    """Assert that reading the files fails with EIO, and that each is named in the log once."""
    for path in bad:
        assert path.name in os.listdir(path.parent)
        assert fails(path)
    until(lambda: len([line for line in log_of(mountpoint).splitlines() if all(p in line for p in parts)]) == len(bad))


@pytest.mark.parametrize("view", FILES)
def test_a_bad_document_is_eio_and_the_rest_is_read(tmp_path: Path, view: str) -> None:
    for number, document in enumerate(BROKEN):
        broken(tmp_path / f"all/store{number}", document)
    with mounted(tmp_path / "all", tmp_path / "mnt", f"view={view}") as mountpoint:
        for number, document in enumerate(BROKEN):
            store = mountpoint / f"store{number}"
            if not document.startswith("raw"):
                bad = [store / {"v3": "zarr.json", "v2": ".zgroup", "arrays": ".attributes.json"}[view]]
            else:
                bad = [store / f"raw{name}" if name[0] == "." and view == "arrays" else store / "raw" / name
                       for name in FILES[view]]  # fmt: skip
            assert_bad(bad, mountpoint, store.name, *document.split("/"))
            if view in VERSIONS_OF:
                assert opened(VERSIONS_OF[view], store / "zstd").shape == (6, 7, 8)
            else:
                assert np.load(store / "zstd.npy").shape == (6, 7, 8)


@pytest.mark.parametrize("document", ["raw/.zarray", ".zgroup", "raw"])
def test_a_bad_document_makes_a_netcdf_file_eio(tmp_path: Path, document: str) -> None:
    broken(tmp_path / "store", document)
    with mounted(tmp_path / "store", tmp_path / "mnt", "view=netcdf") as mountpoint:
        assert_bad([mountpoint / "store.nc"], mountpoint, *document.split("/"))


def test_changes_of_the_source_are_seen_and_chunks_keep_their_identity(tmp_path: Path) -> None:
    store = shutil.copytree(ROOT / "v0_int32_01", tmp_path / "store")
    with mounted(store, tmp_path / "mnt", "view=v3", "attr_timeout=0") as mountpoint:
        chunk, source = mountpoint / "0.0", store / "__zdata__/0.0.blosc"
        where = json.loads(os.getxattr(chunk, "user.zarrfs.source"))
        assert where == {"url": source.as_uri()}
        with open(chunk, "rb") as file:
            first = file.read(4)
            source.with_name("new").write_bytes(b"other bytes")
            os.rename(source.with_name("new"), source)  # an atomic rename, as Zarr writes
            assert file.read() == (ROOT / "v0_int32_01/__zdata__/0.0.blosc").read_bytes()[len(first) :]
        assert chunk.read_bytes() == b"other bytes"
        about = json.loads((store / "__zmeta__").read_text())
        (store / "__zmeta__").write_text(json.dumps(about | {"shape": [1100, 8]}))
        os.utime(store / "__zmeta__", (LATER, LATER))
        until(lambda: fails(chunk))
        assert json.loads((mountpoint / "zarr.json").read_text())["shape"] != [1100, 8]
        refresh(mountpoint)
        until(lambda: json.loads((mountpoint / "zarr.json").read_text())["shape"] == [1100, 8])
        assert chunk.read_bytes() == b"other bytes"
        status = (mountpoint / "zarr.json").stat()
        assert (status.st_size, status.st_mtime) == (len((mountpoint / "zarr.json").read_bytes()), LATER)


def fails(path: Path) -> bool:
    """Return whether reading a file fails with EIO."""
    try:
        path.read_bytes()
    except OSError as exc:
        return exc.errno == errno.EIO
    return False


@pytest.mark.parametrize("version", VERSIONS)
def test_the_experimental_v3_of_zarr_python_2_is_read(tmp_path: Path, version: int) -> None:
    assert DRAFT
    store = DRAFT[0].store
    with mounted(store, tmp_path / "mnt", f"view=v{version}") as mountpoint:
        for sample in DRAFT:
            assert read(version, mountpoint.parent, sample._replace(store=mountpoint)) == "equal", sample.label
        found = {str(path.relative_to(mountpoint)) for path in mountpoint.rglob("*")}
    assert not any(key.startswith(("meta", "data/root")) for key in found)


def test_the_experimental_v3_below_another_directory_is_left_out_with_the_reason(tmp_path: Path) -> None:
    shutil.copytree(DRAFT[0].store, tmp_path / "base/exp.zarr")
    shutil.copytree(ROOT / "v3_hier", tmp_path / "base/v3.zarr")
    with mounted(tmp_path / "base", tmp_path / "mnt", "view=v2") as mountpoint:
        assert os.listdir(mountpoint / "exp.zarr") == []
        assert opened(2, mountpoint / "v3.zarr/raw").shape == (21, 18)
    done = run("check", tmp_path / "base")
    assert "exp.zarr" in done.stdout + done.stderr
    assert "mount this directory itself" in done.stdout + done.stderr
