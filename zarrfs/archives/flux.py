"""Loader of archives in the KVS of the running Flux instance, and of jobspecs, by `flux kvs get` and `flux job info`.

FLUX_URI selects the instance, as for every command of Flux. Blobs are loaded by flux_blobs.py.
Sources: flux-kvs(1), flux-job(1).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess

from zarrfs.archives.source_kinds import FLUX
from zarrfs.errors import SourceError, reason_of

_MESSAGE_MAX = 300  # characters quoted of a command's message


def document(source: str, timeout: float) -> bytes:
    """Fetch the archive "flux:NAME" or the jobspec "flux:job/ID" by a command of at most `timeout` seconds. Blocks.

    Raise SourceError for a malformed name, and with the message of the command if that fails.
    """
    name = source.removeprefix(FLUX)
    job = name.removeprefix("job/") if name.startswith("job/") else None
    if not name or job == "" or name.startswith("-") or (job or "").startswith("-") or "\0" in name:
        raise SourceError(source, "expected flux:NAME (an archive of the Flux instance) or flux:job/ID (of a job)")
    command = ["flux", *(["kvs", "get", f"archive.{name}"] if job is None else ["job", "info", job, "jobspec"])]
    shown = shlex.join(command)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"FLUX_KVS_NAMESPACE": "primary"},  # not a job's namespace
        )  # fmt: skip
    except OSError as exc:
        raise SourceError(source, f"{shown}: cannot run flux: {reason_of(exc)}") from None
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as exc:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes, which inherit the pipes
            if isinstance(exc, subprocess.TimeoutExpired):
                raise SourceError(source, f"{shown}: no answer within {timeout:g} s") from None
            raise
    if process.returncode:
        said = " ".join(err.decode(errors="replace").split())[:_MESSAGE_MAX] or f"status {process.returncode}"
        raise SourceError(source, f"{shown}: {said}")
    return out
