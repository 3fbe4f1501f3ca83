"""Loader of blobs from the running Flux instance, by `flux content load`.

One command loads several blobs and concatenates them; the declared lengths split its output. A command takes the
blobs that were requested while others ran, so that many small blobs need few processes.
Sources: flux-content(1), RFC 10.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from dataclasses import dataclass, field

import trio

from zarrfs.concurrency.tasks import in_background
from zarrfs.errors import ReadError, TargetMissing, reason_of
from zarrfs.system.buffers import Buffer

_COMMANDS = 4  # at the same time
_BATCH, _BATCH_BYTES = 64, 4 << 20  # blobs, and bytes, that a command loads; one blob may be larger
_MESSAGE_MAX = 300  # characters quoted of a command's message
_MISSING = "error loading blob: No such file or directory"


@dataclass(slots=True)
class _Request:
    blobref: str
    size: int
    timeout: float
    done: trio.Event = field(default_factory=trio.Event)
    result: Buffer | ReadError | None = None  # when `done` is set

    def fail(self, why: str) -> None:
        self.result = ReadError(f"flux:{self.blobref}", why)
        self.done.set()


class FluxBlobs:
    """The blobs of the running instance. All methods run on one trio loop."""

    def __init__(self) -> None:
        self._waiting: deque[_Request] = deque()
        self._running: set[trio.CancelScope] = set()

    async def load(self, blobref: str, size: int, timeout: float) -> Buffer:
        """Load a blob of `size` bytes; its length and hash are not verified. Raise TargetMissing or ReadError.

        A command is killed after `timeout` seconds.
        """
        request = _Request(blobref, size, timeout)
        self._waiting.append(request)
        if len(self._running) < _COMMANDS:
            scope = trio.CancelScope()
            self._running.add(scope)
            in_background(self._run, scope)
        await request.done.wait()
        assert request.result is not None
        if isinstance(request.result, ReadError):
            raise request.result
        return request.result

    async def aclose(self) -> None:
        """Kill the commands that run. Loads fail."""
        for scope in self._running:
            scope.cancel()
        while self._waiting:
            self._waiting.popleft().fail("the reader is closed")

    async def _run(self, scope: trio.CancelScope) -> None:
        """Load the blobs that are waiting, until there are none."""
        try:
            with scope:
                while self._waiting:
                    await self._load_next()
        finally:
            self._running.remove(scope)

    async def _load_next(self) -> None:
        batch = [self._waiting.popleft()]
        room, timeout = _BATCH_BYTES - batch[0].size, batch[0].timeout
        while self._waiting and len(batch) < _BATCH and (room := room - self._waiting[0].size) >= 0:
            batch.append(self._waiting.popleft())
        why = "the reader is closed"
        try:
            with trio.fail_after(timeout):
                await _load(batch)
        except trio.TooSlowError:
            why = f"flux content load: no answer within {timeout:g} s"
        finally:
            for request in batch:
                if request.result is None:
                    request.fail(why)
                request.done.set()


async def _load(batch: list[_Request]) -> None:
    """Set the results of `batch`."""
    data: Buffer | ReadError
    try:
        data = await _output([request.blobref for request in batch])
    except ReadError as exc:
        data = exc
    if len(batch) == 1:
        batch[0].result = data
    elif not isinstance(data, ReadError) and len(data) == sum(request.size for request in batch):
        view = memoryview(data)
        for request in batch:
            request.result, view = bytes(view[: request.size]), view[request.size :]
    else:  # a blob is missing, or has another length
        for request in batch:
            await _load([request])


async def _output(blobrefs: list[str]) -> bytes:
    """Return the output of `flux content load BLOBREF...`. Raise TargetMissing or ReadError."""
    where = f"flux:{blobrefs[0]}"
    try:
        done = await trio.run_process(
            ["flux", "content", "load", *blobrefs], capture_stdout=True, capture_stderr=True, check=False,
            start_new_session=True, env=os.environ | {"LC_ALL": "C"}, deliver_cancel=_kill,
        )  # fmt: skip
    except OSError as exc:
        raise ReadError(where, f"flux content load: cannot run flux: {reason_of(exc)}") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-_MESSAGE_MAX:]
        if said.endswith(_MISSING):
            raise TargetMissing(where, "no such blob")
        raise ReadError(where, f"flux content load: {said or f'status {done.returncode}'}")
    return done.stdout


async def _kill(process: trio.Process) -> None:
    """Kill a command with the children of its group, because `flux` may be a script that runs others."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
