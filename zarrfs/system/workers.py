"""A pool of forked worker processes, for work on many small files.

Two threads are slower than one, because they wait for the interpreter lock (docs/archives.md).
"""

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

_AHEAD = 4  # tasks per process that may be sent before the caller takes their results
_PATIENCE = 500  # ms
_USUAL = 8 << 20  # bytes of memory per task; if tasks may need more, _AHEAD is reduced to 1
_KILLED = "a process that reads or writes files was killed"


class Workers:
    """A pool that runs `function(task, memory)` in up to `jobs` processes. Tasks and results are marshalled.

    The processes are forked by start(), or when map() gets a second task, and see the state of the caller at that
    moment. `memory` is shared with the caller, and has `size` bytes per task. SourceErrors of the pool itself name
    `about`. close() must be called to end the processes.
    """

    def __init__(
        self, function: Callable[[Any, memoryview], Any], jobs: int, size: int = 0, about: str = "archive",
        begin: Callable[[], object] = lambda: None, pause: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Call `begin` in each worker before its first task, and `pause` here twice a second while waiting."""
        self._function, self._jobs, self._about = function, jobs, about
        self._begin, self._pause = begin, pause
        self._ahead = _AHEAD if size <= _USUAL else 1
        self._idle: list[_Worker] = []
        self._busy: dict[int, tuple[_Worker, int]] = {}  # by descriptor of answers: the worker, number of its task
        self._results: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._poll = select.poll()
        slots = 2 * (1 if jobs == 1 else jobs * self._ahead)  # for two concurrent calls of map()
        self._memory = _Memory(size, slots)

    def map(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, memoryview]]:
        """Yield (result, memory) in the order of the tasks. The memory is valid until the next result is taken.

        Two calls may be in progress at the same time. Raise the SourceError or UsageError of a task, SourceError if a
        process dies, RuntimeError for any other exception of a task in a worker process.
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
        waiting: deque[tuple[int, int]] = deque()  # (number of a task, slot of its memory)
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
            elif waiting or more:  # also if `waiting` is empty: another call of map() may have all processes busy
                self._receive()

    def close(self) -> None:
        """End the processes and wait for them. Kill all of them if any is busy."""
        workers = self._idle + [worker for worker, _number in self._busy.values()]
        for worker in workers:
            worker.end(bool(self._busy))
        self._idle, self._busy = [], {}

    def start(self) -> None:
        """Fork the processes unless they run already or `jobs` is 1. They are killed when the calling thread ends.

        Raise OSError if a process cannot be started; the others are then ended.
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
        with contextlib.suppress(BrokenPipeError):  # the worker has died, which _receive() reports
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
    """Slots of anonymous memory shared with forked processes. The slot that was freed last is reused first."""

    def __init__(self, size: int, count: int) -> None:
        self._size = size
        try:
            self._whole = memoryview(mmap.mmap(-1, size * count) if size else b"")
        except OSError as exc:
            rule = f"no {size * count >> 20:,} MiB of memory for what is read at once"
            raise UsageError(f"{rule}: give fewer --jobs or smaller regions") from exc
        self._free = list(range(count))[::-1]

    def take(self) -> int:
        """Take a free slot."""
        return self._free.pop()

    def give(self, number: int) -> None:
        """Free a slot."""
        self._free.append(number)

    def of(self, number: int) -> memoryview:
        """Return the memory of a slot."""
        return self._whole[number * self._size : (number + 1) * self._size]


class _Worker:
    """One worker process, with a pipe for tasks and one for answers."""

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
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets SIGINT, too, and ends this worker
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    for descriptor in (tasks, answers, *(d for other in others for d in other.descriptors())):
                        os.close(descriptor)  # so that the pipe of tasks ends when the parent ends
                    begin()
                    _serve(function, os.fdopen(theirs, "rb"), os.fdopen(mine, "wb"))
                finally:
                    os._exit(0)
        os.close(theirs)
        os.close(mine)
        self.tasks, self.answers = os.fdopen(tasks, "wb"), os.fdopen(answers, "rb")

    def descriptors(self) -> tuple[int, int]:
        """Return the parent's ends of the pipes."""
        return self.tasks.fileno(), self.answers.fileno()

    def end(self, at_once: bool) -> None:
        """End the process and wait for it. With `at_once`, kill it; otherwise let it end at the end of its tasks."""
        if at_once:
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.tasks.close()
        self.answers.close()
        os.waitpid(self._pid, 0)


def _pipes() -> tuple[int, int, int, int]:
    """Make two pipes and return their four ends. Raise OSError, with none left open."""
    first = os.pipe()
    try:
        return *first, *os.pipe()
    except OSError:
        for descriptor in first:
            os.close(descriptor)
        raise


@contextlib.contextmanager
def _signals_held() -> Iterator[set[int]]:
    """Block SIGINT and SIGTERM in the body, so that a new process does not run the handlers of its parent."""
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
            except Exception:  # a bug, reported by the parent
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
