"""Fixtures of all tests: the program, sample data, and cache and configuration directories that are not the user's."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

import hypothesis
import pytest

from tests import forkserver
from tests.servers import azure, faulty, gcs, nginx, s3, sftp, signed_s3
from zarrfs.metrics import counters

__all__ = ["azure", "faulty", "gcs", "nginx", "s3", "sftp", "signed_s3"]

DATA = Path(__file__).parent / "data"
PROGRAM = os.path.join(os.path.dirname(sys.executable), "zarrfs")


def _ends_take_effect() -> None:
    """Stop ignoring signals that nohup, a shell's background job or a CI runner ignores: test programs inherit that.

    In this process such a signal still has no effect, except SIGINT, which tests send to themselves.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # execve(2) resets a handled signal to its default action


_ends_take_effect()  # before any module of tests is imported
hypothesis.settings.register_profile("zarrfs", deadline=None)  # nothing here is timed
hypothesis.settings.load_profile("zarrfs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: a long test, which only scripts/test nightly runs")


def pytest_collection_finish() -> None:
    """Exclude the million objects of modules and tests from garbage collections: each would take 0.6 s more."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape text that is not UTF-8 in a report: otherwise an xdist worker aborts the whole run."""
    return _escaped((yield))


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return type(value)(map(_escaped, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True)
def _counters_begin_at_zero() -> None:
    """Count what each test does in this process by itself."""
    counters.COUNTS.clear()
    counters.CACHES.clear()
    counters.QUEUES.clear()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests their own cache and configuration directories, so that the user's are not used."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def _planners_are_forked() -> Iterator[None]:
    """Have commands and stores in this process make plans in children of the fork server, not in new interpreters."""
    from zarrfs.sources import child

    program, patch = child._program, pytest.MonkeyPatch()

    def planner(request: bytes) -> forkserver.Planner | subprocess.Popen[bytes]:
        return forkserver.plan(request) or program(request)

    patch.setattr(child, "_program", planner)
    yield
    patch.undo()


def open_descriptors() -> set[str]:
    """Return the numbers of this process' open descriptors, after a garbage collection has closed unused ones.

    The fork server's are left out, because any test may start that server.
    """
    gc.collect()
    listed = os.listdir("/proc/self/fd")  # includes the descriptor of the listing itself
    return {name for name in listed if os.path.lexists(f"/proc/self/fd/{name}")} - forkserver.descriptors()


def run(
    *arguments: object, program: Sequence[str] = (PROGRAM,), cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None, **more: object,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run zarrfs with captured output; do not check its status. It is forked if possible: see tests/forkserver.py."""
    command = [*program, *map(str, arguments)]
    if command[0] == PROGRAM and not more:
        done = forkserver.run(command, cwd, os.environ if env is None else env, 120)
        if done is not None:
            return done
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env, **more
    )  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """Mount a new tmpfs on the new directory `path`."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=False).returncode:
        pytest.skip("no mount(2) here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of the sample reference sets, with the path of their data filled in."""
    source, made = DATA / "references", tmp_path_factory.mktemp("references")
    for document in source.glob("*.json"):
        text = document.read_text().replace("@DATA@", str(source / "data"))
        (made / document.name).write_text(text)
    return made
