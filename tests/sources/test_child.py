"""The child process that makes a plan: a fork of a zarrfs program or a new interpreter, with the same results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DATA

PLAN = """
import os, sys
from zarrfs.config.options import Options
from zarrfs.sources import plan_source
real = os.fork
os.fork = lambda: print("fork", flush=True) or real()
plan_source(sys.argv[1], Options(), forks=True)
"""


def test_a_document_that_is_mounted_again_needs_no_child(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLAN, str(DATA / "archives/flux-list.json")]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    found = [subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env).stdout for _ in range(2)]
    assert found == [b"fork\n", b""]


def test_a_child_that_is_ended_before_it_answers_leaves_no_index(tmp_path: Path) -> None:
    """Without a cache directory, the index is for the parent alone."""
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "1"}}')
    (tmp_path / "tmp").mkdir()
    script = f"""
import os, signal
from zarrfs.sources import prepare, plan_source
from zarrfs.config.options import Options
real = prepare.prepare
def late(*given):
    plan = real(*given)
    assert plan.temporary and os.path.exists(plan.index)
    prepare.json.dumps = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    return plan
prepare.prepare = late
plan_source({str(tmp_path)!r} + "/refs.json", Options(), forks=True)
"""
    place = {"XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | place, capture_output=True, text=True, check=False
    )
    assert "reading it failed with status 130" in done.stderr
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("forks", [True, False])
def test_a_child_without_exit_status_gives_its_result(forks: bool, tmp_path: Path) -> None:
    """A program that ignores SIGCHLD gets no exit status of its children."""
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a": "1"}}')
    script = f"""
import signal
from zarrfs.errors import SourceError
from zarrfs.config.options import Options
from zarrfs.sources import plan_source
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for name in ("refs.json", "none.json"):
    try:
        print(plan_source({str(tmp_path)!r} + "/" + name, Options(), forks={forks}).kind)
    except SourceError as exc:
        print(exc.rule)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("references\nno such file or directory\n", "")


MEMORY = """
import json, sys
import fsspec, zarrfs
for refs in {"a": "inline"}, {"a": ["{{ 3 ** (10 ** 9) % 7 }}", 0, 1]}:
    fsspec.filesystem("memory").pipe("/set.json", json.dumps({"version": 1, "refs": refs}).encode())
    try:
        print(fsspec.filesystem("zarrfs", source="memory://set.json").cat_file("a"))
    except zarrfs.errors.SourceError as exc:
        print(exc)
"""


def test_rendering_a_document_in_memory_does_not_end_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'inline'", "memory://set.json: its templates take too much time to render"]
