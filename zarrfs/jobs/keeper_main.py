"""The program of the keeper (keeper.py), run by its path. It imports only built-in modules, to use little memory.

Arguments: owner processes as PID:START, "-" to read more of them from standard input, one per line, then "--" and the
command to execute once all owners have ended and standard input is closed. Without owners and "-" it waits forever.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import posix
import select
import sys

_HIGHEST = 1 << 16  # higher than any open descriptor


def _watch(poll: select.poll, left: set[int], word: str) -> None:
    """Register the process PID:START with `poll`, unless it has ended."""
    pid, start = word.split(":")
    try:
        descriptor = posix.pidfd_open(int(pid))
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return
    if fields[19] == start and fields[0] not in "ZX":
        poll.register(descriptor, select.POLLIN)
        left.add(descriptor)


def _wait(poll: select.poll, left: set[int], for_good: bool) -> None:
    """Wait until all owners have ended and standard input, if it is read, is closed; or `for_good`."""
    rest = b""
    while left or for_good:
        for descriptor, _ in poll.poll():
            said = posix.read(0, 4096) if descriptor == 0 else b""
            if not said:
                poll.unregister(descriptor)
                left.discard(descriptor)
                continue
            *words, rest = (rest + said).split(b"\n")
            for word in words:
                _watch(poll, left, word.decode())


def _main(arguments: list[str]) -> None:
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    with open("/proc/self/comm", "w") as file:
        file.write("zarrfs-keeper")
    at = arguments.index("--")
    poll: select.poll = select.poll()
    left: set[int] = set()
    for word in arguments[:at]:
        if word == "-":
            poll.register(0, select.POLLIN)
            left.add(0)
        else:
            _watch(poll, left, word)
    posix.write(1, b".")
    posix.dup2(2, 1)
    _wait(poll, left, at == 0)
    posix.closerange(3, _HIGHEST)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _signal.valid_signals())
    posix.execv(arguments[at + 1], arguments[at + 1 :])


if __name__ == "__main__":
    _main(sys.argv[1:])
