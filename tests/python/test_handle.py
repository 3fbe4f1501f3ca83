"""open_store() and read_array(): a source in Python, with the options of the command line, without a mount."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import zarrfs
from tests.conftest import open_descriptors
from tests.servers import Nginx
from tests.servers import nginx as nginx
from zarrfs.config.keywords import as_items
from zarrfs.config.options import TABLE, Options, parse
from zarrfs.python import background, handle
from zarrfs.store.overlay import Overlay


@pytest.fixture
def source(tmp_path: Path) -> str:
    refs = {"a/b": "hello", "a/c": "x", "top": "y", "gone": [str(tmp_path / "none.bin"), 0, 4]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return str(tmp_path / "refs.json")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Write a directory, a source that is opened without a child process; return its path."""
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/b").write_text("hello")
    (tmp_path / "tree/top").write_text("y")
    return tmp_path / "tree"


def loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "zarrfs"]


def test_a_source_is_read_and_closing_it_leaves_no_thread_or_descriptor(source: str) -> None:
    before = open_descriptors()
    with zarrfs.open_store(Path(source), memory_limit="64MiB") as store:
        assert [entry.name for entry in store.list_dir()] == ["a", "gone", "top"]
        assert list(store.list("a")) == ["a/b", "a/c"]
        assert list(store) == ["a/b", "a/c", "gone", "top"]
        assert (store.get("a/b"), store.get("a/b", 1, 2), store.get("a/b", -2), store.get("a/b", 9)) == (
            b"hello", b"el", b"lo", b"",
        )  # fmt: skip
        assert store.info("a").kind is zarrfs.Kind.DIRECTORY
        assert store.info("a/b").size == 5
        assert store.locate("gone")["length"] == 4
        assert (store["top"], "top" in store, "a" in store, "none" in store) == (b"y", True, False, False)
        with pytest.raises(KeyError):
            store["a"]
        assert loops()
    assert store.closed
    assert not loops()
    assert open_descriptors() - before == set()
    with pytest.raises(zarrfs.UsageError, match="this handle is closed"):
        store.get("a/b")


def test_an_unreadable_value_is_an_error_and_not_a_missing_key(source: str) -> None:
    with zarrfs.open_store(source) as store:
        assert "gone" in store
        with pytest.raises(zarrfs.ReadError, match=r"none\.bin"):
            store["gone"]


@pytest.mark.parametrize("blobs", [(), ("http://127.0.0.1:9/blobs",)])
def test_links_of_an_archive_are_followed_wherever_its_blobs_are(blobs: tuple[str, ...], tmp_path: Path) -> None:
    files = [
        {"path": "d", "mode": 0o40755},
        {"path": "d/f", "mode": 0o100644, "encoding": "utf-8", "data": "hello"},
        {"path": "l", "mode": 0o120777, "data": "d"},
    ]
    (tmp_path / "archive.json").write_text(json.dumps(files))
    with zarrfs.open_store(tmp_path / "archive.json", blobs=blobs) as store:
        assert store.get("l/f") == b"hello"


def test_links_resolve_to_the_changes_in_an_upper_directory(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    for link, target in (("l", "a/b"), ("d", "a"), ("gone", "top"), ("circle", "top2"), ("top2", "top")):
        (tree / link).symlink_to(target)

    async def change() -> None:
        store = zarrfs.open_trio_store(tree, upperdir=tmp_path / "changes")
        assert isinstance(store, Overlay)
        store.upper.lock(True)
        await store.set("a/b", b"changed")
        await store.set("a/new", b"new")
        await store.delete("top")
        await store.aclose()

    trio.run(change)
    (tmp_path / "changes/mine").symlink_to("d/new")
    (tmp_path / "changes/top2").symlink_to("circle")
    with zarrfs.open_store(tree, upperdir=tmp_path / "changes") as store:
        assert [store.get(key) for key in ("l", "d/b", "d/new", "mine")] == [b"changed", b"changed", b"new", b"new"]
        with pytest.raises(zarrfs.ReadError, match="gone: is, or lies behind, a symbolic link that leads nowhere"):
            store.get("gone")
        with pytest.raises(zarrfs.ReadError, match=r"circle: .* in a circle"):
            store.get("circle")
        with pytest.raises(zarrfs.NotFound):
            store.get("d/none")


def test_errors_have_the_messages_of_the_command_line(tree: Path) -> None:
    with pytest.raises(zarrfs.SourceError, match=r"none\.json: no such file"):
        zarrfs.open_store("/none.json")
    with pytest.raises(zarrfs.UsageError, match=r"unknown option 'retrys' \(did you mean retries\?\)"):
        zarrfs.open_store(tree, retrys=5)
    with pytest.raises(zarrfs.UsageError, match="unknown option 'retrys'"):
        zarrfs.open_store(tree, retrys=False)
    with pytest.raises(zarrfs.UsageError, match="option storage_options: expected values that JSON has"):
        zarrfs.open_store(tree, storage_options={"s3": {"session": object()}})
    with zarrfs.open_store(tree) as store, pytest.raises(zarrfs.StoreError, match="a/x: no such key"):
        store.get("a/x")
    assert not loops()


def test_a_bad_entry_of_a_reference_set_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "x", "b": ["u", -5, 1]}}')
    with zarrfs.open_store(tmp_path / "refs.json") as store:
        assert len(store.warnings) == 1
        assert store.warnings[0] in caplog.text
    with pytest.raises(zarrfs.SourceError, match="b"):
        zarrfs.open_store(tmp_path / "refs.json", strict=True)


def test_every_option_takes_a_python_value() -> None:
    """The parser of the command line returns each value as passed, but lists as tuples and paths as text."""
    given: dict[str, Any] = {
        "umask": 0o22, "allow_path": [Path("/data"), "/srv"], "missing_status": [403, 404], "read_timeout": 0.25,
        "memory_limit": 1 << 30, "members": ["a", "b/c"], "retries": np.int64(3), "type": "archive",
        "storage_options": {"s3": {"anon": True}}, "s3://b.key": "5",
        "gs": {"token": "anon"},
    }  # fmt: skip
    parsed = parse(as_items(given)).options
    assert parsed.storage == {"s3": {"anon": True}, "s3://b": {"key": "5"}, "gs": {"token": "anon"}}
    assert {name: getattr(parsed, name) for name in given if name in TABLE and name != "storage_options"} == {
        "umask": 0o22, "allow_path": ("/data", "/srv"), "missing_status": (403, 404), "read_timeout": 0.25,
        "memory_limit": 1 << 30, "members": ("a", "b/c"), "retries": 3, "type": "archive",
    }  # fmt: skip
    defaults = {name: field.default for name, field in TABLE.items()}
    assert parse(as_items(defaults)).options == Options()


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ({"part_size": 0}, "option part_size=0B: expected a size from 4KiB to 1GiB"),
        ({"host_requests": 0}, "option host_requests=0: expected a whole number from 1 to 10000"),
        ({"read_timeout": 0.0}, "option read_timeout=0: expected a time from 10ms to 30d"),
        ({"retries": {}}, "option retries={}: expected a whole number from 0 to 1000"),
        ({"retries": True}, "option retries needs a value: retries=N"),
        ({"cache_size": "20"}, "option cache_size=20: expected a size with a unit, such as 64MiB"),
    ],
)
def test_values_are_checked_as_on_the_command_line(tree: Path, option: dict[str, Any], rule: str) -> None:
    with pytest.raises(zarrfs.UsageError) as caught:
        zarrfs.open_store(tree, **option)
    assert str(caught.value) == rule


def test_configuration_files_and_environment_variables_apply(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zarrfs.toml").write_text(f'[source.era5]\nsource = "{source}"\n')
    with zarrfs.open_store("era5", config=tmp_path / "zarrfs.toml") as store:
        assert pickle.loads(pickle.dumps(store))["top"] == b"y"
    monkeypatch.setenv("ZARRFS_RETRIES", "-1")
    with pytest.raises(zarrfs.UsageError, match=r"^\$ZARRFS_RETRIES: option retries=-1: expected"):
        zarrfs.open_store(source)


def test_threads_share_a_handle_and_its_event_loop(tree: Path) -> None:
    with zarrfs.open_store(tree) as store, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(store.get, ["a/b"] * 200)) == {b"hello"}
        assert loops() == ["zarrfs"]


def test_copies_of_a_pickled_handle_share_one_store_and_refuse_a_changed_source(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with zarrfs.open_store("refs.json", strict=True) as store:
        pickled = pickle.dumps(store)
    monkeypatch.chdir("/")
    first, second = pickle.loads(pickled), pickle.loads(pickled)
    assert first == second == store
    assert (first["top"], second["top"]) == (b"y", b"y")
    assert first.opened() is second.opened()
    first.close()
    assert second["top"] == b"y"
    Path(source).write_text('{"version": 1, "refs": {"top": "z"}}')
    with zarrfs.open_store(source) as changed:
        assert changed != store
    _forget_shared()
    with pytest.raises(zarrfs.SourceError, match="has changed since this handle was opened"):
        pickle.loads(pickled)["top"]
    assert not loops()


def test_relative_options_of_a_pickled_handle_refer_to_the_original_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = {"version": 1, "refs": {"a": ["a.bin", 0, 1]}}
    for place in "here", "there":
        (tmp_path / place / "data").mkdir(parents=True)
        (tmp_path / place / "data/a.bin").write_text(place[0])
        (tmp_path / place / "refs.json").write_text(json.dumps(refs))
        (tmp_path / place / "zarrfs.toml").write_text(f"[options]\nretries = {10 + len(place)}\n")
    monkeypatch.chdir(tmp_path / "here")
    with zarrfs.open_store("refs.json", base="data", allow_path=["data"], config="zarrfs.toml") as store:
        pickled = pickle.dumps(store)
    monkeypatch.chdir(tmp_path / "there")
    again = pickle.loads(pickled)
    assert again["a"] == b"h"
    assert again.opened().options.retries == 14
    _forget_shared()


@pytest.mark.parametrize(
    ("option", "item"),
    [
        ({"upperdir": "d"}, "upperdir=/work/d"), ({"ca_bundle": "c.pem"}, "ca_bundle=/work/c.pem"),
        ({"cache_dir": "http://h/x"}, "cache_dir=http://h/x"), ({"blobs": "b"}, "blobs=/work/b"),
        ({"blobs": "https://h/b"}, "blobs=https://h/b"), ({"blobs": "flux:"}, "blobs=flux:"),
        ({"base": "../d"}, "base=/d"), ({"base": "s3://b/d"}, "base=s3://b/d"), ({"members": "a/b"}, "members=a/b"),
        ({"s3.key": "a=b"}, 's3.key="a=b"'),
    ],
)  # fmt: skip
def test_paths_of_options_are_absolute(option: dict[str, Any], item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/work")
    assert [*map(handle._absolute_item, as_items(option))] == [item]


def _forget_shared() -> None:
    for opened in handle._shared.values():
        opened.close()
    handle._shared.clear()


def _read_in_child(store: zarrfs.StoreHandle, answers: Connection) -> None:
    answers.send(store["a/b"])
    store.close()
    answers.send(loops())


def test_copies_of_handles_opened_before_and_after_a_change_share_no_store(tmp_path: Path) -> None:
    import zarr

    link = tmp_path / "x"
    for number in (1, 2):
        zarr.create_array(tmp_path / f"v{number}", data=np.full(4, number, "i4"), chunks=(4,), compressors=None)
        link.unlink(missing_ok=True)
        link.symlink_to(f"v{number}")
        with zarrfs.open_store(link) as store:
            copies = [pickle.loads(pickle.dumps(store)) for _ in range(2)]
            assert copies[0]["c/0"] == store["c/0"] == np.full(4, number, "i4").tobytes()
            assert copies[0].opened() is copies[1].opened()
            assert copies[0] == store
    _forget_shared()


@pytest.mark.parametrize("anew", [False, True])
def test_reading_a_removed_directory_is_an_error_and_not_a_missing_key(anew: bool, tmp_path: Path) -> None:
    """to_zarr(mode="w") removes and recreates the directory; missing keys would read as fill values."""
    import zarr

    zarr.create_array(tmp_path / "x", data=np.arange(4), chunks=(2,), fill_value=7)
    with zarrfs.open_store(tmp_path / "x") as store:
        shutil.rmtree(tmp_path / "x")
        if anew:
            zarr.create_array(tmp_path / "x", data=np.arange(4), chunks=(2,), fill_value=7)
        for call in (lambda: store["c/0"], lambda: store["c/9"], lambda: store.info("c"), lambda: store.list_dir("")):
            with pytest.raises(zarrfs.ReadError, match="was removed"):
                call()


def test_a_relative_path_of_a_zip_file_refers_to_the_directory_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "x.zip", "w") as file:
            file.writestr(".zgroup", '{"zarr_format": 2}')
            file.writestr("k", name)
    monkeypatch.chdir(tmp_path / "here")
    with zarrfs.open_store("zip://::x.zip") as store:
        monkeypatch.chdir(tmp_path / "there")
        assert store["k"] == pickle.loads(pickle.dumps(store))["k"] == b"here"
    _forget_shared()


def test_no_text_of_a_handle_shows_a_password(nginx: Nginx) -> None:
    (nginx.late.root / "shown.json").write_text('{".zgroup": "{\\"zarr_format\\": 2}"}')
    url = f"{nginx.late.url}/shown.json".replace("://", "://joe:hush@")
    store = zarrfs.zarr_store(url)
    texts = [repr(store), str(store), repr(store.handle)]
    store.handle.close()
    with pytest.raises(zarrfs.UsageError) as caught:
        store.handle["x"]
    assert not [text for text in (*texts, str(caught.value)) if "hush" in text]


def test_a_forked_process_opens_the_source_for_itself(tree: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    with zarrfs.open_store(tree) as store:
        child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(store, theirs))
        child.start()
        assert ours.poll(60)
        assert (ours.recv(), ours.recv()) == (b"hello", [])
        child.join(60)
        assert child.exitcode == 0
        assert store["a/b"] == b"hello"


def test_a_garbage_collected_handle_is_closed(tree: Path) -> None:
    store = zarrfs.open_store(tree)
    assert store["top"] == b"y"
    del store
    gc.collect()
    deadline = time.monotonic() + 60
    while loops() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loops()


def test_calls_made_while_the_loop_stops_return_or_fail() -> None:
    async def call() -> None:
        return

    def calls(loop: background.LoopThread) -> None:
        with contextlib.suppress(zarrfs.UsageError):
            while True:
                loop.call(call)

    for _ in range(20):
        loop = background.LoopThread()
        threads = [threading.Thread(target=calls, args=(loop,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.003)
        loop.stop()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_a_call_ends_when_it_is_cancelled_or_its_loop_is_released() -> None:
    async def wait(ended: threading.Event) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    loop = background.acquire()
    try:
        cancelled, closed = threading.Event(), threading.Event()
        future, other = loop.submit(wait, cancelled), loop.submit(wait, closed)
        time.sleep(0.05)
        future.cancel()
        assert cancelled.wait(60)
    finally:
        background.release()
    assert closed.is_set()
    with pytest.raises(zarrfs.UsageError, match="was closed while it was read"):
        other.result(60)


@pytest.mark.parametrize(
    "error",
    [
        zarrfs.NotFound("a/b"), zarrfs.UsageError("no"), zarrfs.SourceError("s", "is bad", "e"),
        zarrfs.ReadError("w", "lost", 503), zarrfs.StoreError("k", "why"),
    ],
)  # fmt: skip
def test_errors_survive_pickling(error: zarrfs.ZarrfsError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_a_selection_is_read_without_the_chunks_outside_it(tmp_path: Path) -> None:
    import zarr

    values = np.arange(7 * 11 * 5, dtype="i4").reshape(7, 11, 5)
    for order in "CF":
        group = zarr.open_group(tmp_path / f"{order}.zarr", mode="w", zarr_format=2)
        group.create_array("x", shape=values.shape, chunks=(3, 4, 2), dtype="i4", order=order)[:] = values
        (tmp_path / f"{order}.zarr/x/0.0.0").write_bytes(b"no chunk")
        with zarrfs.open_store(tmp_path / f"{order}.zarr") as store:
            for part in (
                np.s_[3:], np.s_[-1], np.s_[5, ::-2, 1:4], np.s_[..., 4, 4], np.s_[6:2:-3, 4:9:2], np.s_[3:3],
                np.s_[4, 4, 4],
            ):  # fmt: skip
                found = store.read_array("x", part)
                assert found.shape == np.shape(values[part])
                assert (found == values[part]).all()
            with pytest.raises(zarrfs.ReadError, match=r"x/0\.0\.0"):  # so no selection above has read this chunk
                store.read_array("x")
            with pytest.raises(IndexError, match="selection 7 of dimension 0: expected a whole number from -7 to 6"):
                store.read_array("x", 7)
            with pytest.raises(IndexError, match="selection True of dimension 0: expected a whole number"):
                store.read_array("x", True)
            with pytest.raises(IndexError, match="expected a whole number"):
                store.read_array("x", (np.array([1, 2]), ...))  # type: ignore[arg-type]
    assert (zarrfs.read_array(tmp_path / "C.zarr", "x", np.s_[3:]) == values[3:]).all()
    assert not loops()


def test_chunks_between_the_items_of_a_selection_are_not_read(tmp_path: Path) -> None:
    import zarr

    values = np.arange(9, dtype="i4")
    zarr.create_array(tmp_path / "x", shape=values.shape, chunks=2, dtype="i4", zarr_format=2)[:] = values
    (tmp_path / "x/1").write_bytes(b"no chunk")
    for part in (np.s_[::4], np.s_[::-4], np.s_[1::3], np.s_[4:0:-4]):
        assert zarrfs.read_array(tmp_path / "x", "", part).tolist() == values[part].tolist()
    with pytest.raises(zarrfs.ReadError, match="1"):
        zarrfs.read_array(tmp_path / "x", "", np.s_[::2])


def test_open_trio_store_returns_the_store_itself(tree: Path) -> None:
    store = zarrfs.open_trio_store(tree)

    async def read() -> bytes:
        try:
            return bytes(await store.get("a/b", 1))
        finally:
            await store.aclose()

    assert trio.run(read) == b"ello"


def test_a_new_opening_does_not_trust_negative_entries_of_an_earlier_one(nginx: Nginx) -> None:
    """The table of cached names is kept on disk for other processes, for metadata_ttl=."""
    url, root = f"{nginx.plain.url}/names_since", nginx.plain.root / "names_since"
    root.mkdir()
    (root / ".zgroup").write_text('{"zarr_format": 2}')

    def read(key: str) -> bytes:
        store = zarrfs.open_trio_store(url)

        async def get() -> bytes:
            try:
                return bytes(await store.get(key))
            finally:
                await store.aclose()

        return trio.run(get)

    with pytest.raises(zarrfs.NotFound):
        read("late")
    (root / "late").write_bytes(b"2")
    assert read("late") == b"2"


def test_importing_zarrfs_imports_no_submodule() -> None:
    program = "import sys; import zarrfs; print([one for one in sys.modules if 'zarrfs.' in one], dir(zarrfs))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] [")
    assert "open_store" in done.stdout


def test_child_processes_find_packages_where_the_program_does(source: str) -> None:
    """Environment modules and `pip install --target` rely on PYTHONPATH, which isolated interpreters ignore."""
    program = "import sys, zarrfs; sys.stdout.buffer.write(zarrfs.open_store(sys.argv[1]).get('a/b'))"
    base = getattr(sys, "_base_executable", sys.executable)  # the interpreter outside this virtual environment
    places = os.pathsep.join([str(Path(zarrfs.__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [base, "-c", program, source], env={**os.environ, "PYTHONPATH": places}, cwd="/", capture_output=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"hello", b"")
