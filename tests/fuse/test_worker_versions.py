"""Versions of a source in a mount with several processes, where a shared number says which one is visible."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyfuse3
import pytest
import trio
import trio.testing
from pyfuse3 import FlagT, InodeT

from tests.fuse.test_versions import CONTEXT, PausedStore
from zarrfs.config.options import Options
from zarrfs.daemon import workers as daemon_workers
from zarrfs.daemon.invalidation import Invalidation
from zarrfs.daemon.live_options import LiveOptions
from zarrfs.daemon.refreshing import Refresher
from zarrfs.daemon.workers import Session, Starter, Team
from zarrfs.documents.plan import Plan
from zarrfs.errors import TargetChanged
from zarrfs.fuse.shared import Shared
from zarrfs.fuse.versions import StoreVersion
from zarrfs.fuse.worker import WorkerOperations
from zarrfs.fuse.workerloop import Front
from zarrfs.metrics import logs
from zarrfs.sources import discard, open_plan, plan_source
from zarrfs.store.api import Info
from zarrfs.store.directory import FileSystemStore


class HookedStore(FileSystemStore):
    """A store that calls a function of the test while it lists a directory."""

    def __init__(self, path: Path, hook: Any) -> None:
        super().__init__(str(path))
        self._hook = hook

    async def list_dir(self, key: str, after: str = "") -> AsyncGenerator[Info, None]:
        self._hook()
        async for info in super().list_dir(key, after):
            yield info


def worker(store: FileSystemStore, shared: Shared, new: Path) -> WorkerOperations:
    """Return the handlers of a worker that has a new version ready."""
    operations = WorkerOperations(store, Options(), {}, lambda: None, shared, 1)
    operations.prepare(StoreVersion(FileSystemStore(str(new)), Options()))
    return operations


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Return two directories, of which the second has a longer file `a`."""
    for name in ("old", "newer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(f"of the {name} one")
    return tmp_path / "old", tmp_path / "newer"


def test_a_lookup_during_a_refresh_shows_the_new_version(trees: tuple[Path, Path]) -> None:
    """The worker has not noticed the refresh when its store answers; the kernel would cache an old entry."""

    async def body() -> None:
        shared, store, found = Shared(2), PausedStore(trees[0]), []
        operations = worker(store, shared, trees[1])

        async def look_up() -> None:
            found.append(await operations.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT))

        async with trio.open_nursery() as nursery:
            store.may_answer = trio.Event()
            nursery.start_soon(look_up)
            await trio.testing.wait_all_tasks_blocked()
            shared.visible[0] = 2
            store.may_answer.set()
        assert found[0].st_size == len("of the newer one")
        assert not operations.inodes.is_old(found[0].st_ino)
        await operations.aclose()

    trio.run(body)


def test_an_open_that_finds_no_handle_free_keeps_no_version(
    trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a version that a refresh has replaced would stay in memory until the unmount."""

    async def body() -> None:
        operations = worker(FileSystemStore(str(trees[0])), Shared(2), trees[1])
        file = await operations.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
        monkeypatch.setattr(operations._handles, "take", lambda *_: None)
        for opened in operations.opendir(InodeT(1), CONTEXT), operations.open(file.st_ino, FlagT(0), CONTEXT):
            with pytest.raises(pyfuse3.FUSEError) as caught:
                await opened
            assert caught.value.errno == errno.ENFILE
        assert operations.current.users == 0
        await operations.aclose()

    trio.run(body)


def test_a_listing_during_a_refresh_is_not_cached(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def reply(_token: object, name: bytes, entry: pyfuse3.EntryAttributes, _next: int) -> bool:
        sent.append(entry.entry_timeout)
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)

    async def body() -> None:
        shared = Shared(2)
        operations = worker(HookedStore(trees[0], lambda: shared.visible.__setitem__(0, 2)), shared, trees[1])
        handle = await operations.opendir(InodeT(1), CONTEXT)
        await operations.readdir(handle, 2, cast(pyfuse3.ReaddirToken, None))
        assert sent == [0]
        await operations.releasedir(handle)
        await operations.aclose()

    trio.run(body)


def planned(document: Path) -> Plan:
    """Plan a document with a temporary index."""
    return plan_source(str(document), Options(cache="none"), child=False)


class FirstProcess:
    """The first process of a mount with two processes, of which the second is not started."""

    def __init__(self, document: Path) -> None:
        options = Options(cache="none")
        plan = planned(document)
        self.shared = Shared(2)
        session = Session(Front(), -1, None, "", {}, options, self.shared, True)
        self.team = Team(cast(Starter, None), session, plan, options, 2)
        self.operations, _waiting = self.team.first(open_plan(self.team.plan, options), lambda: None)
        self.plan = dataclasses.replace(plan, named=str(document))

    async def aclose(self) -> None:
        discard(self.team._opening.plan)  # the refresher does that in a mount
        self.team.discard_older()
        await self.operations.aclose()

    def refresher(self, class_: type[Refresher] = Refresher, kernel: Kernel | None = None) -> Refresher:
        return class_(self.operations, self.plan, self.team.options, kernel or Kernel(), None, self.team)


def test_a_worker_without_the_visible_version_logs_why_and_exits(tmp_path: Path) -> None:
    shared = Shared(2)
    shared.visible[0] = 2
    child = os.fork()
    if not child:
        try:
            logs.configure(Options(log_file=str(tmp_path / "log")), False)
            WorkerOperations(FileSystemStore(str(tmp_path)), Options(), {}, lambda: None, shared, 1).visible()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "ends: it has not opened the version that a refresh shows" in (tmp_path / "log").read_text()


class ChangedStore(FileSystemStore):
    """A store whose targets have changed."""

    async def info(self, key: str, sized: bool = True) -> Info:
        raise TargetChanged(key, "has changed since it was first read")


class Kernel(Invalidation):
    """A substitute for the kernel that records the `invalidated` names."""

    def __init__(self) -> None:
        self.invalidated = set[str]()

    async def names(self, known: dict[str, int]) -> None:
        self.invalidated |= known.keys()


def test_a_new_worker_opens_only_versions_with_open_files(tmp_path: Path) -> None:
    """Their temporary indexes are deleted by the first refresh after the last file is closed."""
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first = FirstProcess(document)
        operations, team = first.operations, first.team

        async def refresh() -> None:
            plan = planned(document)
            store = open_plan(dataclasses.replace(plan, temporary=False), team.options)
            await team.show(plan, team.options, StoreVersion(store, team.options))

        entry = await operations.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
        opened = await operations.open(entry.st_ino, FlagT(os.O_RDONLY), CONTEXT)
        await refresh()
        assert list(team._generations()) == [1, 2]
        index = first.plan.index
        assert index is not None
        assert os.path.exists(index)
        await operations.release(opened.fh)
        await refresh()
        assert list(team._generations()) == [3]
        assert not os.path.exists(index)
        await first.aclose()

    trio.run(body)


def test_the_temporary_index_of_a_running_mount_does_not_look_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new worker may have to open the index at any time."""
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))
    monkeypatch.setattr(daemon_workers, "_COUNTERS", 0.01)

    async def idle(_device: int) -> None:
        await trio.sleep_forever()

    async def body() -> None:
        first = FirstProcess(document)
        index = first.plan.index
        assert index is not None
        for path in index, os.path.dirname(index):
            os.utime(path, (0, 0))
        first.team._count = 1  # no worker is started
        first.team._waiting = cast(Any, SimpleNamespace(watch=idle))
        with trio.move_on_after(1):
            await first.team.run()
        discard(planned(document))  # deletes abandoned indexes
        assert os.path.exists(index)
        await first.aclose()

    trio.run(body)


def test_names_that_are_looked_up_while_workers_open_the_new_version_are_invalidated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without epochs would cache such a name for a day."""
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first, kernel = FirstProcess(document), Kernel()
        first.operations.absent = OrderedDict()

        async def tell(_what: str, *_arguments: Any) -> None:
            await first.operations.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)

        monkeypatch.setattr(first.team, "_tell", tell)
        document.write_text(json.dumps({"b": "another"}))
        assert (await first.refresher(kernel=kernel).refresh())["result"] == "refreshed"
        assert "a" in kernel.invalidated
        await first.aclose()

    trio.run(body)


def test_a_refresh_to_a_source_that_needs_one_process_is_refused(tmp_path: Path) -> None:
    """Each process would record target versions for itself, and a reader could get bytes of two versions."""
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first = FirstProcess(document)
        before, refresher = first.operations.current, first.refresher()
        document.write_text(json.dumps({"a": ["http://127.0.0.1:1/x", 0, 4]}))
        error = (await refresher.refresh())["error"]
        assert "targets behind URLs need a cache_dir=" in error
        assert error.endswith(": unmount it and mount it again")
        assert first.operations.current is before
        await first.aclose()

    trio.run(body)


def test_the_first_refresh_of_a_mount_restricted_to_one_process_changes_nothing(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first = FirstProcess(document)
        plan = dataclasses.replace(first.plan, single_process=True)
        refresher = Refresher(first.operations, plan, first.team.options, Kernel(), None)
        assert (await refresher.refresh())["result"] == "unchanged"
        await first.aclose()

    trio.run(body)


def test_options_changed_during_a_refresh_apply_to_the_new_version(tmp_path: Path) -> None:
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first, answers = FirstProcess(document), []

        class Interrupted(Refresher):
            def _plan_again(self, options: Options) -> Plan:
                answers.append(trio.from_thread.run(live.apply, "prefetch=8M"))
                return super()._plan_again(options)

        refresher = first.refresher(Interrupted)
        live = LiveOptions(first.operations, refresher, first.team.options, first.team)
        assert "error" not in await refresher.refresh(force=True)
        assert answers == [{"changed": {"prefetch": 8 << 20}}]
        assert first.team.options.prefetch == 8 << 20
        await first.aclose()

    trio.run(body)


def test_a_target_that_a_worker_found_changed_is_accepted_by_a_refresh(tmp_path: Path) -> None:
    """The document is unchanged, so only the failed lookup of the worker shows that a refresh is needed."""
    (document := tmp_path / "set.json").write_text(json.dumps({"a": "value"}))

    async def body() -> None:
        first = FirstProcess(document)
        refresher = first.refresher()
        assert (await refresher.refresh())["result"] == "unchanged"
        store = ChangedStore(str(tmp_path))
        operations = WorkerOperations(store, Options(), {}, lambda: None, first.shared, 1)
        with pytest.raises(pyfuse3.FUSEError):
            await operations.lookup(InodeT(1), pyfuse3.FileNameT(b"a"), CONTEXT)
        assert (await refresher.refresh())["result"] == "refreshed"
        assert (await refresher.refresh())["result"] == "unchanged"
        await first.aclose()
        await operations.aclose()

    trio.run(body)
