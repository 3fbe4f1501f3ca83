"""Signals that end a program, and arrive where Python drops exceptions: in importlib's callbacks, or in C code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT = 50  # seconds; the programs here sleep for 60 if no signal ends them
DROP = """
import io, os, signal, time, weakref

class Thing:
    pass

def clear(number):
    class Raw(io.RawIOBase):
        def seekable(self):
            return True
        def readable(self):
            return True
        def seek(self, offset, whence=0):
            os.kill(os.getpid(), number)
            return 0
    io.BufferedReader(Raw())

def drop(number):
    def callback(_reference):
        os.kill(os.getpid(), number)
        for _ in range(100):
            pass
    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
"""


def run(program: str, *words: str | Path) -> tuple[int, str]:
    """Run a Python program with clear() and drop(); return its exit status and its standard error."""
    command = [sys.executable, "-c", DROP + program, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    return ended.returncode, ended.stderr


COMMAND = "import sys; sys.path.insert(0, sys.argv.pop()); import zarrfs.cli as cli\n"


@pytest.mark.parametrize("name", ["ls", "mount"])
def test_ctrl_c_while_a_command_starts(tmp_path: Path, name: str) -> None:
    (tmp_path / "slow.py").write_text(f"{DROP}\ndrop(signal.SIGINT)\ntime.sleep(60)\n")
    program = f"{COMMAND}cli.COMMANDS['{name}'] = ('slow', ''); cli.main()"
    assert run(program, name, "x", tmp_path) == (130, "")


def test_ctrl_c_while_the_program_is_imported() -> None:
    program = """
import sys
from zarrfs.__main__ import program
class Finder:
    def find_spec(self, name, *_more):
        if name == "zarrfs.cli.common":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
program()"""
    assert run(program) == (130, "")


def test_ctrl_c_while_mount_zarrfs_starts(tmp_path: Path) -> None:
    program = """
import sys
from zarrfs.cli import mount_helper
def settings(*_, **__):
    drop(signal.SIGINT)
    time.sleep(60)
mount_helper.settings = settings
sys.exit(mount_helper.main())
"""
    assert run(program, tmp_path, tmp_path) == (8, f"mount.zarrfs: {tmp_path}: interrupted\n")


@pytest.mark.parametrize("lose", ["drop", "clear"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_child_that_makes_a_plan(number: signal.Signals, lose: str) -> None:
    program = f"""
import dataclasses, json
from zarrfs.config.options import Options
from zarrfs.sources import child, prepare
def slow(*_):
    {lose}({number:d})
    time.sleep(60)
prepare.prepare = slow
asked = dict(sources=["x"], options=dataclasses.asdict(Options()), parent=os.getppid())
child._serve(json.dumps(asked).encode(), 1)
"""
    assert run(program) == (130, "")


def test_a_deadlines_exception_is_raised_again() -> None:
    program = """
from zarrfs.errors import TimedOut
from zarrfs.jobs.deadline import Deadline
from zarrfs.system.signals import raise_again
raise_again()
try:
    with Deadline(50).armed():
        drop(signal.SIGALRM)
        time.sleep(60)
except TimedOut:
    raise SystemExit(7)
"""
    assert run(program)[0] == 7


def test_an_exception_that_is_dropped_twice_is_raised_again() -> None:
    program = """
from zarrfs.system.signals import raise_again
raise_again()
class Slow:
    def __del__(self):
        drop(signal.SIGINT)
        time.sleep(0.2)  # the second one comes here
try:
    Slow()
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    began = time.monotonic()
    assert run(program)[0] == 7
    assert time.monotonic() - began < LIMIT


def test_an_alarm_that_arrives_while_the_hook_runs_is_not_lost() -> None:
    """On a busy machine the timer may expire before the hook has returned."""
    program = """
import sys
from zarrfs.system.signals import raise_again
raise_again()
start = signal.setitimer
def start_and_wait(*when):
    start(*when)
    if sys._getframe(1).f_code.co_name == "_hook":
        time.sleep(0.05)
signal.setitimer = start_and_wait
try:
    drop(signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    assert run(program) == (7, "")


@pytest.mark.parametrize("then", [
    "from zarrfs.system.signals import raise_again; raise_again(); drop(signal.SIGINT)",
    "from zarrfs.jobs.deadline import Deadline; late = Deadline(0.001).armed(); late.__enter__()",
    "from zarrfs.system.signals import End; drop(signal.SIGTERM)",
])  # fmt: skip
def test_an_alarm_that_interrupts_no_system_call_is_repeated(then: str) -> None:
    """The alarm arrives after Python's last check for signals, but before the system call that it should interrupt."""
    program = f"""
import ctypes
from zarrfs.errors import TimedOut
def end(*_):
    raise End(7)
signal.signal(signal.SIGTERM, end)
libc = ctypes.CDLL(None)
libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
libc.signal.restype = ctypes.c_void_p
start = signal.setitimer
def start_and_lose(which, *when):
    signal.setitimer = start
    handler = libc.signal(signal.SIGALRM, ctypes.cast(libc.abs, ctypes.c_void_p))
    start(which, *when)
    time.sleep(0.005)
    libc.signal(signal.SIGALRM, handler)
signal.setitimer = start_and_lose
try:
    {then}
    time.sleep(60)
except (KeyboardInterrupt, TimedOut, SystemExit):
    os._exit(7)
"""
    assert run(program)[0] == 7


def test_other_exceptions_are_printed() -> None:
    program = """
from zarrfs.system.signals import raise_again
raise_again()
class Wrong:
    def __del__(self):
        raise ValueError("of no signal")
Wrong()
time.sleep(0.1)
"""
    status, said = run(program)
    assert status == 0
    assert "ValueError: of no signal" in said
