"""Forked processes for many small files: threads wait for each other more than for the system (docs/archives.md)."""

from __future__ import annotations

import contextlib
import itertools
import marshal
import mmap
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from zarrfs.errors import SourceError, UsageError
from zarrfs.system.processes import end_with_parent

_AHEAD = 4  # tasks of each process that are done, or being done, before they are asked for
_PATIENCE = 500  # ms
_USUAL = 8 << 20  # bytes of memory: tasks that may need more are not done ahead
_KILLED = "a process that reads or writes files was killed"


class Workers:
    """Runs `function(task, memory)` in up to `jobs` processes; both tasks and results are what marshal takes.

    They are forked by start(), or when there is more than one task, and see what the caller had then. Closing ends
    them at once. `memory` is shared, `size` bytes for each task. Errors are `about` what is named.
    """

    def __init__(
        self, function: Callable[[Any, memoryview], Any], jobs: int, size: int = 0, about: str = "archive",
        begin: Callable[[], object] = lambda: None, pause: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`begin` is called in each process before its first task; `pause` in this one, while nothing comes."""
        self._function, self._jobs, self._about = function, jobs, about
        self._begin, self._pause = begin, pause
        self._ahead = _AHEAD if size <= _USUAL else 1
        self._idle: list[_Worker] = []
        self._busy: dict[int, tuple[_Worker, int]] = {}  # by descriptor: and the number of the task
        self._results: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._poll = select.poll()
        slots = 2 * (1 if jobs == 1 else jobs * self._ahead)  # for two calls of map()
        self._memory = _Memory(size, slots)

    def map(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, memoryview]]:
        """The results, in the order of the tasks, and the memory of each, which is its own until the next one.

        One call may be made while another one is not at its end. What a task raises is raised here, if it is a
        SourceError or UsageError; SourceError where a process dies.
        """
        source = iter(tasks)
        few = list(itertools.islice(source, 2))
        source = itertools.chain(few, source)
        if self._jobs == 1 or len(few) < 2:
            slot = self._memory.take()
            try:
                memory = self._memory.of(slot)
                for task in source:
                    yield self._function(task, memory), memory
            finally:
                self._memory.give(slot)
            return
        self.start()
        waiting: deque[tuple[int, int]] = deque()  # numbers of tasks, and where their memory is
        more = True
        while more or waiting:
            while more and self._idle and len(waiting) < self._jobs * self._ahead:
                task = next(source, None)
                more = task is not None
                if more:
                    slot = self._memory.take()
                    waiting.append((self._send(task, slot), slot))
            if waiting and waiting[0][0] in self._results:
                number, slot = waiting.popleft()
                yield self._results.pop(number), self._memory.of(slot)
                self._memory.give(slot)
            elif waiting or more:  # the other call may have all processes busy
                self._receive()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        workers = self._idle + [worker for worker, _number in self._busy.values()]
        for worker in workers:
            worker.end(bool(self._busy))
        self._idle, self._busy = [], {}

    def start(self) -> None:
        """Fork the processes, if there are to be any, and are none yet. They end with the thread that does this.

        OSError where that cannot be done: then there are none.
        """
        if self._jobs == 1 or self._idle or self._busy:
            return
        for _ in range(self._jobs):
            try:
                worker = _Worker(self._run, self._begin, self._idle)
            except OSError:
                self.close()
                raise
            self._idle.append(worker)
            self._poll.register(worker.answers, select.POLLIN)

    def _run(self, task: tuple[Any, int]) -> Any:
        return self._function(task[0], self._memory.of(task[1]))

    def _send(self, task: Any, slot: int) -> int:
        number, worker = next(self._numbers), self._idle.pop()
        self._busy[worker.answers.fileno()] = worker, number
        with contextlib.suppress(BrokenPipeError):  # it has died, which reading from it tells
            _write(worker.tasks, (task, slot))
        return number

    def _receive(self) -> None:
        while not (ready := self._poll.poll(_PATIENCE)):
            self._pause()
        for descriptor, _event in ready:
            if descriptor not in self._busy:
                raise SourceError(self._about, _KILLED)
            worker, number = self._busy[descriptor]
            try:
                kind, value = _read(worker.answers)
            except EOFError:
                raise SourceError(self._about, _KILLED) from None
            del self._busy[descriptor]
            self._idle.append(worker)
            if kind == "source":
                raise SourceError(*value)
            if kind == "usage":
                raise UsageError(value)
            if kind == "other":
                raise RuntimeError(value)
            self._results[number] = value


class _Memory:
    """Pieces of memory, shared with processes that are forked: as few of them are in use as can be."""

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        try:
            self._whole = memoryview(mmap.mmap(-1, size * count) if size else b"")
        except OSError as exc:
            rule = f"no {size * count >> 20:,} MiB of memory for what is read at once"
            raise UsageError(f"{rule}: say fewer --jobs, or smaller regions") from exc
        self._free = list(range(count))[::-1]

    def take(self) -> int:
        """The number of a piece that nobody uses."""
        return self._free.pop()

    def give(self, number: int) -> None:
        """Nobody uses it any more."""
        self._free.append(number)

    def of(self, number: int) -> memoryview:
        """The piece of that number."""
        return self._whole[number * self._size : (number + 1) * self._size]


class _Worker:
    """One process, and the pipes to it and from it."""

    def __init__(self, function: Callable[[Any], Any], begin: Callable[[], object], others: list[_Worker]) -> None:
        parent = os.getpid()
        theirs, tasks, answers, mine = pipes = _pipes()
        with _signals_held() as before:
            try:
                self._pid = os.fork()
            except OSError:
                for descriptor in pipes:
                    os.close(descriptor)
                raise
            if not self._pid:
                try:
                    end_with_parent(parent, signal.SIGKILL)
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us hears it, too, and ends us
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    for descriptor in (tasks, answers, *(d for other in others for d in other.descriptors())):
                        os.close(descriptor)  # so that the end of who started us is the end of the tasks
                    begin()
                    _serve(function, os.fdopen(theirs, "rb"), os.fdopen(mine, "wb"))
                finally:
                    os._exit(0)
        os.close(theirs)
        os.close(mine)
        self.tasks, self.answers = os.fdopen(tasks, "wb"), os.fdopen(answers, "rb")

    def descriptors(self) -> tuple[int, int]:
        """The ends of the pipes that are not the process's own."""
        return self.tasks.fileno(), self.answers.fileno()

    def end(self, at_once: bool) -> None:
        """End the process, and wait until it has ended."""
        if at_once:
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.tasks.close()
        self.answers.close()
        os.waitpid(self._pid, 0)


def _pipes() -> tuple[int, int, int, int]:
    """Both ends of a pipe, and of another one. OSError."""
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


@contextlib.contextmanager
def _signals_held() -> Iterator[set[int]]:
    """Keep signals that end us from coming now: in a new process, before it ignores them, one is an exception."""
    before = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(function: Callable[[Any], Any], tasks: IO[bytes], answers: IO[bytes]) -> None:
    answer: tuple[str, Any]
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            task = _read(tasks)
            try:
                answer = "result", function(task)
            except SourceError as exc:
                answer = "source", (exc.source, exc.rule, exc.entry)
            except UsageError as exc:
                answer = "usage", str(exc)
            except Exception:  # a bug, to be told by who started us
                answer = "other", traceback.format_exc()
            _write(answers, answer)


def _write(file: IO[bytes], value: Any) -> None:
    data = marshal.dumps(value)
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def _read(file: IO[bytes]) -> Any:
    head = file.read(8)
    data = file.read(int.from_bytes(head, "little"))
    if len(head) < 8 or not data:
        raise EOFError
    return marshal.loads(data)
