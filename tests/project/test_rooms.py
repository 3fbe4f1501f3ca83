"""scripts/test ROOM and --changed: the test files that they choose (tests/rooms.py)."""

from __future__ import annotations

import pytest

from tests import rooms
from tests.conftest import LONGEST
from tests.rooms import ALWAYS, chosen, of_change


def test_a_room_chooses_its_own_tests_and_those_that_import_it() -> None:
    found = chosen(["cache", "-x"])
    assert found[0] == "-x"
    assert {ALWAYS, "tests/cache/test_memory.py", "tests/cache/test_disk.py"} <= set(found)
    assert "tests/store/test_remotefiles.py" not in found  # it imports from store and net, not from cache
    assert "tests/views/test_flat_arrays.py" not in found


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("zarrfs/concurrency/lru.py", "tests/concurrency/test_lru.py"),
        ("zarrfs/copying/commit.py", "tests/copying/test_commit_interrupted.py"),
        ("zarrfs/failures.py", "tests/test_failures.py"),
        ("tests/net/test_http.py", "tests/net/test_http.py"),
        ("tests/net/scripted.py", "tests/net/test_connections.py"),
        ("docs/netcdf.md", "tests/mounts/test_netcdf_page.py"),
        ("docs/netcdf.md", "tests/project/test_pages.py"),
        ("scripts/slurm/prolog", "tests/slurm/test_prologs.py"),
    ],
)
def test_a_changed_file_chooses_its_tests(path: str, test: str) -> None:
    assert test in of_change(path)


def test_changed_files_choose_each_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "changed", lambda: 2 * ["tests/net/test_http.py"] + ["tests/gone.py"])
    assert chosen(["--changed", "-k", "x"]) == ["-k", "x", "tests/net/test_http.py", ALWAYS]


def test_the_files_that_start_first_exist() -> None:
    assert {f"tests/{name}" for name in LONGEST} <= set(rooms.tests())
