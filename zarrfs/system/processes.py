"""Processes: liveness, and the setup of a forked child. Source: proc(5)."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import sys

_VARIABLES = (  # of the environment, with names of files that network clients read
    "NETRC", "SSL_CERT_FILE", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


def is_running(pid: int) -> bool:
    """Return whether a process of this pid namespace is running. A zombie is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):  # the latter if the process ends between open and read
        return False


def children() -> list[int]:
    """Return the child processes of this one, with zombies. Source: proc(5), /proc/PID/task/TID/children."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def shown(pid: int) -> str:
    """Return the description of a process for messages: "pid 12 (sleep)"."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", errors="backslashreplace") as file:
        return f"pid {pid} ({file.read().strip()})"
    return f"pid {pid}"


def python(module: str) -> list[str]:
    """Return a command that runs `module` in a new interpreter with the packages of this one. Arguments may follow it.

    The new interpreter (-I) ignores PYTHON* variables, the user's site-packages and the working directory. zarrfs may
    be installed in one of these places, so the command sets sys.path to the absolute paths in this process's sys.path.
    """
    places = [place for place in sys.path if os.path.isabs(place)]
    run = f"import runpy, sys; sys.path = {places!a}; runpy.run_module({module!r}, None, '__main__', True)"
    utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []  # -I ignores PYTHONUTF8, and both must decode names alike
    return [sys.executable, "-I", *utf8, *no_bytecode(), "-c", run]


def no_bytecode() -> list[str]:
    """Return the option that keeps a new interpreter from writing bytecode, if this one writes none either."""
    return ["-B"] if sys.dont_write_bytecode else []


def use_utf8() -> None:
    """Run the program again in UTF-8 mode if the locale has another encoding, because names in stores are UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:  # the latter: at most once
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def readable(descriptor: int, seconds: float) -> bool:
    """Wait up to `seconds` until a descriptor is readable or at its end; return whether it is.

    Unlike select(2), this works for descriptor numbers above 1023.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def end_with_parent(parent: int | None, number: int = 0) -> None:
    """Make the kernel send this process the signal `number` when its parent process `parent` ends; None cancels that.

    If the parent has ended already, this process ends immediately. The kernel also sends the signal when only the
    thread that forked this process ends, so that thread must outlive this process.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, number if parent else 0, 0, 0, 0)  # PR_SET_PDEATHSIG, linux/prctl.h
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def allow_descriptors() -> None:
    """Raise the limit of open files to the maximum that the system allows this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave_directory() -> None:
    """Change the working directory to /, after making relative file names in the environment absolute."""
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value and value[0] not in "/~":
            os.environ[name] = os.path.abspath(value)
    os.chdir("/")


def close_descriptors(keep: set[int]) -> None:
    """In a forked process: redirect stdin and stdout to /dev/null, and close all descriptors but stderr and `keep`."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    low = 3
    for descriptor in [*sorted(keep - {0, 1, 2}), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, descriptor)
        low = descriptor + 1
