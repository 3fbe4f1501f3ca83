"""Start, replace, query and stop the other processes that answer a mount (workers=).

The first process forks another one, the starter, while it has neither threads nor databases. The starter, which never
has any, forks a worker for each order of the first process. The kernel kills the starter when the first process ends,
and the workers when the starter ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import trio

from zarrfs.config.options import Options
from zarrfs.config.values import AUTO
from zarrfs.daemon.channel import Channel, announce
from zarrfs.documents.plan import Plan
from zarrfs.errors import MountError, ZarrfsError
from zarrfs.fuse import sessionloop
from zarrfs.fuse.shared import PARKED, RUNS, WANTED, WOKEN, Shared
from zarrfs.fuse.versions import CounterTotals, StoreVersion
from zarrfs.fuse.worker import WorkerOperations
from zarrfs.fuse.workerloop import Front, SharedWaiting, begin
from zarrfs.metrics import exporters, logs
from zarrfs.metrics.sums import summed
from zarrfs.sources import discard, open_plan
from zarrfs.store.api import Store
from zarrfs.system import fusemount, requirements
from zarrfs.system.cpus import usable
from zarrfs.system.memory import freeze_garbage_collector, memory_limit
from zarrfs.system.processes import close_descriptors, end_with_parent
from zarrfs.views import MODULES

log = logging.getLogger(__name__)

_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE of linux/fuse.h
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # only the first process handles these
_ORDER = 1 << 20  # bytes of the largest order
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_ANSWER = 5.0  # seconds for a worker to answer a question
_OBEYING = 60.0  # seconds for a worker to carry out an order to all workers
_ENDING = 5.0  # seconds for workers to end after the unmount
_COUNTERS = 5.0  # seconds between two updates of the workers' counters
_MOST = 32  # processes that auto starts at most
# auto starts another worker after _BUSY_FOR seconds in each of which a busy process found no parked one _BUSY times
_BUSY, _BUSY_FOR = 2, 3
_IDLE_FOR = 60.0  # auto ends a worker that no process has woken for so many seconds
_LEAST_MEMORY = 64 << 10  # bytes: the least memory_limit=
_SOON, _LATE = 0.1, 30.0  # shortest and longest pause (seconds) before a dead worker is replaced


@dataclasses.dataclass(frozen=True)
class Opening:
    """The parameters with which a process opens a version of the source."""

    plan: Plan  # if its index is temporary, class Team removes it
    options: Options


@dataclasses.dataclass(frozen=True)
class Order:
    """The start parameters of a worker."""

    process: int
    generations: dict[int, Opening]  # replaced versions that may have open files; the last one is the visible version


@dataclasses.dataclass(frozen=True)
class Session:
    """Parameters of a mount that all its processes inherit."""

    front: Front
    device: int  # the descriptor of /dev/fuse
    st_dev: int | None
    mountpoint: str
    about: dict[str, Any]
    options: Options  # of the mount
    shared: Shared


@contextlib.contextmanager
def _cloned(device: int) -> Iterator[int]:
    """Yield another descriptor of a FUSE session, with its own processing queue. Raise OSError if that fails."""
    new = os.open(requirements.DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(new, _CLONE, struct.pack("I", device))
        yield new
    finally:
        os.close(new)


def clone(device: int) -> None:
    """Replace the file behind `device` by a clone with its own processing queue. Raise OSError if that fails."""
    with _cloned(device) as new:
        os.dup2(new, device, inheritable=False)


def may_clone(device: int) -> str | None:
    """Return why the session of a descriptor cannot be cloned for another process; None if it can."""
    try:
        with _cloned(device):
            return None
    except OSError as exc:
        return exc.strerror or str(exc)


def share(options: Options, processes: int) -> Options:
    """Return the options with which each of several processes opens the source: each gets a part of the memory."""
    most = max(_LEAST_MEMORY, memory_limit(options) // processes)
    return dataclasses.replace(options, memory_limit=most, array_cache=options.array_cache // processes)


# -- the starter and the workers


def start(session: Session) -> Starter:
    """Fork the starter. Call it before this process has threads, databases, or an event loop."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with_parent(first, signal.SIGKILL)
            os.environ.pop("NOTIFY_SOCKET", None)  # the first process notifies the service manager
            kept = {theirs.fileno(), session.device, *session.shared.descriptors()}
            kept |= fusemount.descriptors()
            close_descriptors(kept | ({2} if session.options.foreground else set()))
            if not session.options.foreground:
                os.dup2(1, 2)  # closes stderr, because a shell's $(mount ...) waits until it is closed
            _import_for_workers(session.options)
            _take_orders(theirs, session)
        except BaseException as exc:
            logs.configure(session.options, session.options.foreground, session.mountpoint, session.about["source"])
            log.error("the process that starts workers ends: %r", exc)
        finally:
            logs.finish()
            os._exit(1)
    theirs.close()
    return Starter(ours, pid)


def _import_for_workers(options: Options) -> None:
    """Import the modules that workers need, so that they share their memory.

    That memory is exempted from garbage collection, which would write to all of it.
    """
    threads = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"  # numpy's BLAS would start threads, which nothing needs and a fork does not copy
    try:
        for name in ("zarrfs.store.index", *MODULES[options.view]):
            importlib.import_module(name)
    finally:
        os.environ.pop(_BLAS_THREADS)
        if threads is not None:
            os.environ[_BLAS_THREADS] = threads
    gc.collect()
    freeze_garbage_collector()


class Starter:
    """The first process's connection to the starter."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._socket, self.pid = sock, pid
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ORDER)

    def fork(self, order: Order) -> socket.socket:
        """Start a worker; return a socket that is connected to it. Raise OSError if the starter has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [pickle.dumps(order)], [theirs.fileno()], socket.MSG_NOSIGNAL)
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Kill the starter, and with it all remaining workers."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _take_orders(orders: socket.socket, session: Session) -> NoReturn:
    """Fork a worker for each order, as the main function of the starter."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    for number in _IGNORED:
        signal.signal(number, _nothing)  # not SIG_IGN, which programs that a worker starts would inherit
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(orders, _ORDER, 1)
        if not data:
            os._exit(0)
        if not descriptors:
            continue
        starter = os.getpid()
        try:
            child = os.fork()
        except OSError:  # the first process finds its socket closed, and tries again later
            os.close(descriptors[0])
            continue
        if child == 0:
            try:
                end_with_parent(starter, signal.SIGKILL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                orders.close()
                _work(pickle.loads(data), socket.socket(fileno=descriptors[0]), session)
            finally:
                logs.finish()
                os._exit(1)
        os.close(descriptors[0])


def _nothing(_number: int, _frame: object) -> None:
    pass


def _work(order: Order, sock: socket.socket, session: Session) -> NoReturn:
    """Answer requests until the unmount, as the main function of a worker process."""
    *older, generation = order.generations
    visible = order.generations[generation]
    options = visible.options  # the options of the mount, with later changes
    logs.configure(options, options.foreground, session.mountpoint, visible.plan.source)
    try:
        announce(sock, "forked", os.getpid())
        clone(session.device)
        store = _opened(visible, session)
        operations = WorkerOperations(
            store, options, session.about, lambda: None, session.shared, order.process, generation
        )
        waiting = SharedWaiting(session.shared, order.process, session.front)
        session.front.operations = operations
        gc.collect()
        freeze_garbage_collector()
        held = {number: order.generations[number] for number in older}
        trio.run(_serve, operations, waiting, sock, session, held)
    except BaseException as exc:
        log.error("worker %d ends: %s", order.process, exc if isinstance(exc, ZarrfsError | OSError) else repr(exc))
        logs.finish()
        os._exit(1)
    logs.finish()
    os._exit(0)


def _opened(opening: Opening, session: Session) -> Store:
    return open_plan(dataclasses.replace(opening.plan, temporary=False), opening.options)


async def _serve(
    operations: WorkerOperations, waiting: SharedWaiting, sock: socket.socket, session: Session,
    held: dict[int, Opening],
) -> None:  # fmt: skip
    worker = _Worker(operations, session, waiting)
    channel = Channel(sock, worker.answer)

    async def until_first_ends() -> None:
        await channel.run()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        operations.background = nursery
        operations.ask = functools.partial(channel.ask, "control")
        operations.started.set()
        operations.visible()  # ends this process if a refresh did not wait for it
        nursery.start_soon(until_first_ends)
        nursery.start_soon(operations.sweep)
        nursery.start_soon(waiting.watch, session.device)
        nursery.start_soon(exporters.Watch(None, session.mountpoint, dict(session.about)).run, operations.stats)
        operations.begin(operations.current, operations.current.get_ready)
        for generation, opening in held.items():
            try:
                operations.add_replaced(generation, StoreVersion(_opened(opening, session), opening.options))
            except (ZarrfsError, OSError) as exc:  # for files that are open in it, this process answers ESTALE
                log.warning("a version from before a refresh cannot be opened any more: %s", exc)
        async with trio.open_nursery() as serving:

            async def until_idle() -> None:
                await worker.leaving.wait()
                serving.cancel_scope.cancel()

            serving.start_soon(until_idle)
            await sessionloop.run(waiting)
            serving.cancel_scope.cancel()
        with trio.move_on_after(_ANSWER), contextlib.suppress(MountError):
            await channel.ask("ends", operations.own_stats())
        nursery.cancel_scope.cancel()
    with trio.CancelScope(deadline=trio.current_time() + _ENDING, shield=True):
        await operations.aclose()


class _Worker:
    """A worker's answers to questions of the first process."""

    def __init__(self, operations: WorkerOperations, session: Session, waiting: SharedWaiting) -> None:
        self._operations, self._session, self._waiting = operations, session, waiting
        self.leaving = trio.Event()

    async def answer(self, what: str, *arguments: Any) -> Any:
        """Answer one question."""
        return await getattr(self, f"_{what}")(*arguments)

    async def _stats(self) -> dict[str, Any]:
        return self._operations.own_stats()

    async def _prepare(self, opening: Opening) -> None:
        self._operations.prepare(StoreVersion(_opened(opening, self._session), opening.options))

    async def _adjust(self, options: Options) -> None:
        for version in self._operations.versions:
            version.adjust(options)
        logging.getLogger("zarrfs").setLevel(options.log_level.upper())

    async def _reopen(self) -> None:
        logs.reopen()

    async def _end(self) -> bool:
        """End this worker if it has no requests and nothing open; return whether it ends."""
        if not self._operations.idle:
            return False
        self._waiting.stop()
        self.leaving.set()
        return True


# -- the first process


class _Member:
    """The first process's record of a worker."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid = 0
        self.counters: dict[str, Any] = {}
        self.begun = time.monotonic()
        self.ending = False
        self._descriptor: int | None = None

    def forked(self, pid: int) -> None:
        self.pid = pid
        with contextlib.suppress(OSError):
            self._descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        if self._descriptor is None:  # its pid is not known yet; it ends when it finds its socket closed
            self.channel.close()
        else:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Team:
    """The workers of a mount, as its first process manages them."""

    def __init__(self, starter: Starter, session: Session, plan: Plan, options: Options, count: int) -> None:
        self._starter, self._session = starter, session
        self._opening = Opening(plan, options)  # of the visible version
        self._older: dict[int, Opening] = {}  # of replaced versions that may have open files
        self._changing = trio.Lock()  # held while a worker is forked, and while the visible version changes
        self._count = count  # processes, including the first one
        self._members: dict[int, _Member] = {}
        self._ended, self._errors = CounterTotals(), dict[str, Any]()  # counters of workers that have ended
        self._closing = self._alone = False  # _alone: the starter has died, so no worker can be started
        self._operations: WorkerOperations | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the visible version. Opening it does not remove its index."""
        return dataclasses.replace(self._opening.plan, temporary=False)

    @property
    def options(self) -> Options:
        """The options with which each process opens the visible version."""
        return self._opening.options

    @classmethod
    def of(
        cls, front: Front, device: int, st_dev: int | None, mountpoint: str, about: dict[str, Any], options: Options,
        plan: Plan, of_store: Options,
    ) -> Team | None:  # fmt: skip
        """Begin the FUSE session and fork the starter; return None if only one process can or should answer the mount.

        Call it before this process has threads or databases.
        """
        trio.run(begin, front)
        why = may_clone(device)
        if why is not None:
            log.warning("workers=: one process answers the mount, as /dev/fuse cannot be cloned: %s", why)
            return None
        count = options.workers if options.workers != AUTO else min(_MOST, usable() // 2)  # leave cores to readers
        if count <= 1:
            return None
        shared = Shared(count)
        session = Session(front, device, st_dev, mountpoint, about, options, shared)
        of_store = dataclasses.replace(share(of_store, count), targets_since=time.time())
        return cls(start(session), session, plan, of_store, count)

    def first(self, store: Store, on_ready: Callable[[], None]) -> tuple[WorkerOperations, SharedWaiting]:
        """Return the handlers of the first process, and its way of waiting for requests."""
        session = self._session
        operations = WorkerOperations(store, self.options, session.about, on_ready, session.shared, 0)
        operations.gather, operations.totals = self.gather, self._totals
        waiting = SharedWaiting(session.shared, 0, session.front)
        session.shared.put(0, RUNS, 1)
        self._operations, self._waiting = operations, waiting
        return operations, waiting

    async def run(self) -> None:
        """Keep the workers running until cancelled."""
        assert self._operations is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._operations.sweep)
            nursery.start_soon(self._waiting.watch, self._session.device)
            if self._session.options.workers == AUTO:
                nursery.start_soon(self._adapt, nursery)
            else:
                for process in range(1, self._count):
                    nursery.start_soon(self._keep, process)
            while True:
                await trio.sleep(_COUNTERS)
                await self.gather()
                async with self._changing:
                    self._forget_closed()
                    self._use_indexes()

    async def _keep(self, process: int) -> None:
        """Run the worker with the number `process`; replace it whenever it dies."""
        pause = _SOON
        while not self._closing:
            try:
                async with self._changing:
                    # Set before the fork: as soon as the worker runs, it may take a request that this process has
                    # polled, and then a timer must interrupt the read(2) of this process.
                    self._session.shared.put(process, RUNS, 1)
                    sock = self._starter.fork(Order(process, self._generations()))
                    member = _Member(Channel(sock, functools.partial(self._answer, process)))
                    self._members[process] = member
            except OSError as exc:
                self._session.shared.put(process, RUNS, 0)
                if not self._alone:
                    log.error("process %d has died, and workers are started no more: %s", self._starter.pid, exc)
                self._alone = True
                return
            await member.channel.run()
            del self._members[process]
            for cell in RUNS, PARKED:
                self._session.shared.put(process, cell, 0)
            self._session.shared.release_new(process)
            member.close()
            self._keep_counters(member.counters)
            if self._closing or member.ending:
                return
            pause = _SOON if time.monotonic() - member.begun > _LATE else min(_LATE, 4 * pause)
            log.warning("worker %d (process %d) has died and is replaced", process, member.pid)
            await trio.sleep(pause)

    async def _adapt(self, nursery: trio.Nursery) -> None:
        """Start a worker when the running ones cannot keep up with the requests for some seconds; end idle ones."""
        shared, busy, wanted = self._session.shared, 0, 0
        used = [(0, time.monotonic())] * self._count  # by process: how often it was woken, and when it was last in use
        while True:
            await trio.sleep(1)
            now, before, wanted = time.monotonic(), wanted, shared.total(WANTED)
            busy = busy + 1 if wanted - before >= _BUSY else 0
            free = next((process for process in range(1, self._count) if process not in self._members), None)
            if busy >= _BUSY_FOR and free is not None and not self._alone:
                # 1: this second also counts for the next worker
                busy, used[free] = 1, (shared.cell(free, WOKEN), now)
                log.info("worker %d is started", free)
                nursery.start_soon(self._keep, free)
            for process, member in list(self._members.items()):
                woken = shared.cell(process, WOKEN)
                if woken != used[process][0] or not shared.cell(process, PARKED):
                    used[process] = woken, now
                elif now - used[process][1] > _IDLE_FOR:
                    with trio.move_on_after(_ANSWER), contextlib.suppress(MountError):
                        member.ending = await member.channel.ask("end")

    async def _answer(self, process: int, what: str, *arguments: Any) -> Any:
        member = self._members[process]
        if what == "forked":
            member.forked(*arguments)
            return None
        if what == "ends":
            member.ending = True
            member.counters = arguments[0]
            return None
        assert what == "control"
        assert self._operations is not None
        return await self._operations.control_answer(*arguments)

    def _generations(self) -> dict[int, Opening]:
        """Return the versions that a new worker opens, by generation; the visible one is the last."""
        assert self._operations is not None
        self._forget_closed()
        return {**self._older, self._operations.inodes.generation: self._opening}

    def _forget_closed(self) -> None:
        """Drop replaced versions without open files; remove their temporary indexes."""
        assert self._operations is not None
        for generation, opening in list(self._older.items()):
            if not self._operations.has_handles(generation):
                del self._older[generation]
                discard(opening.plan)

    def _use_indexes(self) -> None:
        """Renew the times of temporary indexes: one that is an hour old counts as left behind by a killed process."""
        for opening in (self._opening, *self._older.values()):
            if opening.plan.temporary and opening.plan.index is not None:
                with contextlib.suppress(OSError):
                    os.utime(opening.plan.index)

    def discard_older(self) -> None:
        """Remove the temporary indexes of replaced versions."""
        for opening in self._older.values():
            discard(opening.plan)

    # -- counters

    async def gather(self) -> None:
        """Update the counters of the workers."""
        async with trio.open_nursery() as nursery:
            for member in list(self._members.values()):
                nursery.start_soon(self._ask_counters, member)

    async def _ask_counters(self, member: _Member) -> None:
        with trio.move_on_after(_ANSWER), contextlib.suppress(MountError):
            member.counters = await member.channel.ask("stats")

    def _totals(self, own: dict[str, Any]) -> dict[str, Any]:
        members = [member.counters for member in self._members.values() if member.counters]
        total = summed([own, *members, {"errors": self._errors}])
        return {**self._ended.added_to(total, []), "workers": len(self._members) + 1}

    def _keep_counters(self, counters: dict[str, Any]) -> None:
        self._ended.add(counters)
        self._errors = summed([self._errors, counters.get("errors", {})])

    # -- orders to all

    def share(self, options: Options) -> Options:
        """Return the options with which each process opens the source: each gets a part of the memory."""
        return share(options, self._count)

    async def show(self, plan: Plan, options: Options, version: StoreVersion) -> None:
        """Make another version visible in all processes at the same time.

        All processes open it before a shared number makes it visible. A worker that fails to open it is killed and
        replaced. `version` is the version as this process has opened it.
        """
        assert self._operations is not None
        opening = Opening(plan, options)
        async with self._changing:
            await self._tell("prepare", opening)
            generation = self._operations.inodes.generation
            self._operations.prepare(version)
            self._session.shared.visible[0] = generation + 1
            self._operations.visible()
            self._older[generation], self._opening = self._opening, opening

    async def adjust(self, options: Options) -> None:
        """Make all workers apply changed options. If they are opening a new version, wait until that is visible."""
        async with self._changing:
            known = self._opening.options
            options = dataclasses.replace(options, asked_since=known.asked_since, targets_since=known.targets_since)
            self._opening = dataclasses.replace(self._opening, options=options)
            await self._tell("adjust", options)

    async def reopen_logs(self) -> None:
        """Make all workers reopen their log files."""
        await self._tell("reopen")

    async def _tell(self, what: str, *arguments: Any) -> None:
        """Send an order to all workers; kill those that fail to carry it out.

        A killed worker may be stuck in a system call and end much later. It answers no request any more, so this
        method waits for at most _ENDING seconds; only its successor waits for its end.
        """

        async def tell(member: _Member) -> None:
            try:
                with trio.fail_after(_OBEYING):
                    await member.channel.ask(what, *arguments)
            except (MountError, trio.TooSlowError) as exc:
                if not member.channel.closed:
                    reason = str(exc) or f"no answer for {_OBEYING:g} s"
                    log.warning("a worker (process %d) is replaced: %s", member.pid, reason)
                    member.kill()
                with trio.move_on_after(_ENDING):
                    while not member.channel.closed:  # noqa: ASYNC110  (it closes with the process)
                        await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            for member in list(self._members.values()):
                nursery.start_soon(tell, member)

    async def close(self) -> None:
        """Wait for the workers to end after the unmount, and kill those that do not."""
        self._closing = True
        for process in list(self._members):
            self._session.shared.ring(process)
        with trio.move_on_after(_ENDING):
            while self._members:  # noqa: ASYNC110  (of tasks that run beside this one)
                await trio.sleep(0.01)
        for member in self._members.values():
            member.kill()
        self._starter.close()

    def kill(self) -> None:
        """Kill all workers immediately. Needs no event loop."""
        self._starter.close()
