"""The child process of mounted(). It mounts in the foreground, until it is unmounted or its owner dies.

Options come through standard input, so that other users do not see them in the list of processes. Standard output
gets one reply: a newline when the mount is ready, or a pickled error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import sys
from typing import Any

from zarrfs.config.effective import settings
from zarrfs.errors import MountError, SourceError, UsageError, ZarrfsError, internal_error
from zarrfs.system.processes import end_with_parent, is_running


def main() -> None:
    """Mount as the JSON request on standard input says."""
    request = json.load(sys.stdin.buffer)
    owner: int = request["owner"]
    end_with_parent(owner, signal.SIGTERM)  # later the daemon itself waits for the owner's end
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        _mount(request, owner, answers)
    except (UsageError, SourceError, MountError) as exc:
        _answer(answers, exc)
    except Exception as exc:
        _answer(answers, MountError(str(exc) if isinstance(exc, ZarrfsError) else internal_error(exc)))
    finally:
        if request["private"] and not is_running(owner):
            with contextlib.suppress(OSError):
                os.rmdir(request["mountpoint"])
                os.rmdir(os.path.dirname(request["mountpoint"]))


def _mount(request: dict[str, Any], owner: int, answers: int) -> None:
    from zarrfs.daemon import session

    found = settings(request["items"], [request["source"]], "warning")
    parsed = found.parsed
    if parsed.options.owner:
        raise UsageError("option owner: not for mounted(), which ends the mount with its block")
    parsed.options = dataclasses.replace(parsed.options, foreground=True, owner=(owner,))

    def ready() -> None:
        with contextlib.suppress(OSError):  # the owner has died, so the daemon unmounts
            os.write(answers, b"\n")
        os.close(answers)

    session.mount(found.sources[0], request["mountpoint"], parsed, lambda text: print(text, file=sys.stderr), ready)


def _answer(descriptor: int, error: ZarrfsError) -> None:
    """Write an error. Do nothing if the mount was ready, because the descriptor is closed then."""
    with contextlib.suppress(OSError):
        os.write(descriptor, pickle.dumps(error))


if __name__ == "__main__":
    main()
