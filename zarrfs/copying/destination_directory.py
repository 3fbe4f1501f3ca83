"""The destination directory of a copy: each file appears under its name when it is whole, and none outside of it.

Each directory below is opened without following symbolic links (system/beneath.py), and every operation is relative
to its descriptor, so a process that swaps names meanwhile cannot redirect a write. Unfinished files are in
DIRECTORY/.zarrfs-staging, in a staging directory of the run; beside it lies a journal (destination_journal.py), locked
by the run, that holds the mark of an unfinished run. All methods block; several threads may call them at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import secrets
import shutil
import stat
import threading
from typing import NamedTuple

from zarrfs.config.shares import Share
from zarrfs.copying import destination_journal as journal
from zarrfs.copying.destination_journal import OPEN, STAGING
from zarrfs.errors import SourceError, UsageError, ZarrfsError, reason_of
from zarrfs.store.api import KINDS, Info, Kind, name_rule
from zarrfs.store.destination import sync_file_system
from zarrfs.store.division import Listing
from zarrfs.store.staging import RESERVED, lock, remove_abandoned
from zarrfs.system.beneath import BaseDirectory
from zarrfs.system.processes import boot
from zarrfs.system.renaming import NOREPLACE, rename

EXISTING = ("refuse", "overwrite", "keep", "update", "differs")
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_OURS = stat.S_IRWXU
_TRIES = 100  # retries while another process changes names
# Failures that the next file would have as well.
_FATAL = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
)
# Failures of link(2) where rename(2) may succeed: in FUSE without links, and in AFS between directories, among others.
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV))


class InTheWay(ZarrfsError):
    """An entry whose name is taken by something that stays: by `key`, if that is not the entry's own key."""

    def __init__(self, rule: str, key: str = "") -> None:
        self.key = key
        super().__init__(rule)


def ends_all(exc: BaseException) -> bool:
    """Return whether a failure prevents every further write, as a full disk does."""
    return isinstance(exc, OSError) and exc.errno in _FATAL


class Folder:
    """A directory below the destination. It is finished when its entries and its listing have dropped their holds."""

    __slots__ = ("fresh", "holds", "info", "key", "made", "near", "parent", "wanted")

    def __init__(self, key: str, info: Info, parent: Folder | None) -> None:
        self.key, self.info, self.parent = key, info, parent
        self.holds = 1
        self.wanted = False  # whether it is to be made: it, or an entry below, was selected
        self.made = False  # by this run,
        self.fresh = False  # and so contains nothing else
        self.near = False  # on another file system than the staging directory

    def want(self) -> None:
        """Mark the directory and its parents as to be made: one of them, or an entry below, was selected."""
        at: Folder | None = self
        while at is not None and not at.wanted:
            at.wanted = True
            at = at.parent


def broken_rule(name: str, folder: Folder) -> str | None:
    """Return the rule that a name from any store breaks, or None."""
    rule = name_rule(name) or ("a name with a slash" if "/" in name else None)
    if rule is None and folder.parent is None and name.startswith(RESERVED):
        rule = f"a name that begins with {RESERVED}, which is reserved"
    if rule is None:
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            rule = "a lone surrogate"
    return rule


class Staged(NamedTuple):
    """A file in the staging directory; `descriptor` is open for reading and writing."""

    descriptor: int
    name: bytes
    directory: int


class DestinationDirectory:
    """The directory `path`, created if it is missing, and locked until finish() or abandon().

    `existing` (one of EXISTING) says what happens to existing entries. A run resumes an interrupted one with the same
    `mark`; one with other `picks` ("": everything) stays unfinished, unless this run selects everything. Runs of other
    shares may fill the directory at the same time.
    Raises UsageError if the directory cannot be used, or another run fills it.
    """

    def __init__(
        self, path: str, existing: str = "refuse", mark: str = "", picks: str = "", share: Share | None = None
    ) -> None:
        self.path, self._existing, self._mark, self._picks = path, existing, mark, picks
        self._share, self._note_name = share, journal.name_of(share)
        self.resumed = self._made = False
        self.begun = False  # whether there is an unfinished run with this mark
        self._said: dict[str, object] = {}
        self._spans: journal.Spans = []
        self._ours: journal.Spans = []  # when the runs that this one resumes wrote entries;
        self._safe: journal.Spans = []  # those that are on the disk;
        self._doubtful: journal.Spans = []  # those that a reboot may have lost
        self._noted, self._before = picks, b""  # of the unfinished run: its picks; its journal, if the mark differs
        self._changed = mmap.mmap(-1, 1)  # 0 or 1: whether any entry was placed; shared with forked processes
        self._own = False  # whether the root's mode and time are ours to set
        self._counter = itertools.count()
        self._lock = threading.Lock()
        self._run = self._note = self._staging = -1
        try:
            self._make()
            self._base = BaseDirectory(path)
        except OSError as exc:
            raise UsageError(f"{path}: {reason_of(exc)}") from exc
        try:
            self._begin()
        except OSError as exc:
            self.close()
            raise UsageError(f"{path}: cannot be written to: {reason_of(exc)}") from exc
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path)
            self._made = True

    def _begin(self) -> None:
        """Lock the directory, look at what it contains, and make the staging directory of the run."""
        self._status = os.fstat(self._base.descriptor)
        self._take_note()
        if self._share is None:
            journal.remove_abandoned_runs(self._staging)
        elif not self._own:
            self._own = journal.owned_by_a_share(self._staging, self._mark)
        self._make_run()
        if self._share is not None:  # which the next run of this share removes: there may be very many shares
            self._said["run"] = self._run_name.decode()
            self._write_note()
        self._device = os.fstat(self._run).st_dev

    def _make_run(self) -> None:
        """Make and lock the staging directory of the run, which the run of another share may take for abandoned."""
        for _ in range(_TRIES):
            self._run_name = secrets.token_hex(8).encode()
            os.mkdir(self._run_name, 0o700, dir_fd=self._staging)
            with contextlib.suppress(FileNotFoundError):
                self._run = os.open(self._run_name, OPEN, dir_fd=self._staging)
                if lock(self._run) is not False and os.fstat(self._run).st_nlink:
                    return
                os.close(self._run)
            self._run = -1
        raise OSError(errno.EBUSY, "the staging directory keeps vanishing")

    def _take_note(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(STAGING, 0o700, dir_fd=self._base.descriptor)
            try:
                self._staging = os.open(STAGING, OPEN, dir_fd=self._base.descriptor)
                fresh = self._open_note()
            except FileNotFoundError:  # another run has just ended
                self._forget()
                continue
            except NotADirectoryError:
                raise UsageError(f"{self.path}: {RESERVED} in it, which is reserved, is no directory") from None
            if not journal.lock_note(self._note):
                what = "another run" if self._share is None else f"another run of the share {self._share}"
                raise UsageError(f"{self.path}: {what} is writing to it")
            if os.fstat(self._note).st_nlink:
                self._own = self._is_empty()  # only now: an earlier run may have filled it until it let the lock go
                if not fresh and not journal.alone(self._note):
                    raise UsageError(f"{self.path}: its {RESERVED} holds a journal that is not this user's alone")
                self._read_note(believed=journal.alone(self._staging))
                return
            self._forget()
        raise OSError(errno.EBUSY, "the staging directory keeps vanishing")

    def _is_empty(self) -> bool:
        look = os.open(b".", OPEN, dir_fd=self._base.descriptor)
        try:
            return not set(os.listdir(look)) - {RESERVED}
        finally:
            os.close(look)

    def _open_note(self) -> bool:
        """Open the journal; return whether it is new, and so ours even where root is squashed."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._note = os.open(self._note_name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._staging)
        except FileExistsError:
            self._note = os.open(self._note_name, flags, dir_fd=self._staging)
            return False
        return True

    def _forget(self) -> None:
        for descriptor in (self._note, self._staging):
            if descriptor >= 0:
                os.close(descriptor)
        self._note = self._staging = -1

    def _read_note(self, believed: bool) -> None:
        """Resume the run that left the journal, if it has our mark and is `believed`; then write our own.

        Entries that it wrote before a reboot may not have reached the disk: they are written again.
        """
        now, before, spans = boot(), journal.read(self._note) if believed else b"", []
        left: str | None = None
        since = now
        try:
            said = json.loads(before)
            left = None if self._share is None else journal.run_of(said)
            if self._mark and said["mark"] == self._mark:
                own, then, spans = bool(said["own"]), said["boot"], journal.spans_of(said, self._staging)
                self._safe = [[int(start), int(stop)] for start, stop in said.get("safe", ())]
                doubtful = [span for span in spans if span not in self._safe]
                since = then if doubtful else now  # existing entries may be of that boot
                self._ours = spans
                self.begun, self._own, self._made = True, own, self._made or bool(said.get("made"))
                if self._picks:
                    self._noted = said.get("picks", "")
                self.resumed = since == now
                if not self.resumed:
                    self._doubtful = doubtful
            elif said["mark"]:
                self._before = before
        except journal.DAMAGED:
            pass
        self._said = {"mark": self._mark, "picks": self._noted, "own": self._own, "made": self._made, "boot": since}
        if self._safe:
            self._said["safe"] = self._safe
        if left is not None:
            remove_abandoned(self._staging, os.fsencode(left))
        self._spans = [*spans, [journal.changed_now(self._note, journal.changed_now(self._note)), 0]]
        self._write_note()

    def _write_note(self) -> None:
        journal.write(self._note, json.dumps({**self._said, "spans": self._spans}).encode())

    def forked(self) -> None:
        """Give a forked process its own lock and its own directory for unfinished files. OSError."""
        self._lock = threading.Lock()
        name = b"p%d" % os.getpid()
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._run)
        own = os.open(name, OPEN, dir_fd=self._run)
        os.close(self._run)
        os.close(self._note)
        self._run, self._note = own, -1

    # -- directories

    def root(self, info: Info) -> Folder:
        """Return the folder of the destination itself, for the root of a store."""
        folder = Folder("", info, None)
        folder.wanted = True
        folder.made = self._made
        folder.fresh = self._own and not self.begun and self._share is None
        return folder

    def open(self, folder: Folder) -> int:
        """Open `folder`; create it and its parents if they are missing. OSError, InTheWay."""
        try:
            return self._entered(folder, self._base.directory(os.fsencode(folder.key)))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if folder.key and folder.parent is None:  # in a forked process: its parent process has made it
                raise
            # the longer way makes it, or says what is wrong
        chain: list[Folder] = []
        at: Folder | None = folder
        while at is not None and at.parent is not None:
            chain.append(at)
            at = at.parent
        found = os.open(b".", _HANDLE, dir_fd=self._base.descriptor)
        for one in reversed(chain):
            above = found
            try:
                found = self._step(above, one)
            finally:
                os.close(above)
        return found

    def _step(self, above: int, folder: Folder) -> int:
        name = os.fsencode(folder.info.name)
        for _ in range(_TRIES):
            try:
                return self._entered(folder, os.open(name, _HANDLE, dir_fd=above))
            except FileNotFoundError:
                # without a mode it gets that of the umask; with one, that is set when the directory is full
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o777 if folder.info.mode is None else 0o700, dir_fd=above)
                    folder.near = folder.parent is not None and folder.parent.near
                    folder.made = folder.fresh = True
                    self._changed[0] = 1
            except NotADirectoryError:
                if self._existing != "overwrite":
                    raise InTheWay("is there already, and is no directory", folder.key) from None
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=above)
        raise OSError(errno.EBUSY, "its name keeps changing", folder.key)

    def _entered(self, folder: Folder, found: int) -> int:
        """Prepare a directory that existed before."""
        if folder.fresh or folder.parent is None:
            return found
        status = os.fstat(found)
        closed = status.st_uid == os.geteuid() != 0 and status.st_mode & _OURS != _OURS
        if closed and folder.info.mode is not None and self._existing != "keep":  # it gets its mode when it is full
            os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(status.st_mode) | _OURS)
        near = status.st_dev != self._device
        with self._lock:  # or another thread would take a new file of ours for an abandoned one
            if near and not folder.near:  # remove files of a killed run
                for entry in os.listdir(f"/proc/self/fd/{found}"):
                    if entry.startswith(RESERVED + "."):
                        remove_abandoned(found, os.fsencode(entry))
            folder.near = near
        return found

    # -- entries

    def judge(self, directory: int, info: Info) -> str:
        """Decide what to do about an entry that is no directory: "new", "replace", "kept" or "resumed".

        Raises InTheWay if an existing entry stays, and OSError.
        """
        name = info.name
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return "new"
        # A file that was there before the first run may have the same size and time, and other bytes: in a reference
        # set all files have one time. One that has changed since is ours, or a copy of ours, if it has a time at all.
        since = self._ours[0][0] if self._ours and status.st_dev == self._device else 0  # by one clock only
        timed = info.mtime_ns is not None or info.kind is not Kind.FILE
        known = _within(status, self._ours) or (timed and status.st_ctime_ns >= since)
        if (self.resumed or _within(status, self._safe)) and known and _same(directory, name, status, info):
            return "resumed"
        if self._existing == "keep":
            return "kept"
        if stat.S_ISDIR(status.st_mode):
            if self._existing != "overwrite":
                raise InTheWay("a directory is there already")
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError as exc:
                raise InTheWay(f"a directory is there already: {reason_of(exc)}") from exc
        elif self._existing == "refuse":
            timeless = info._replace(mtime_ns=None)  # a touched document gives new times to entries without one
            older = _within(status, self._ours) and _same(directory, name, status, timeless)
            if not older and not _within(status, self._doubtful):
                raise InTheWay("is there already")
            return "replace"
        return "kept" if self._stays(directory, status, info) else "replace"

    def _stays(self, directory: int, status: os.stat_result, info: Info) -> bool:
        """Return whether an existing entry stays although it might be replaced."""
        if self._existing == "differs":
            return stat.S_IMODE(status.st_mode) == info.mode and _same(directory, info.name, status, info)
        return self._existing == "update" and (info.mtime_ns is None or status.st_mtime_ns >= info.mtime_ns)

    def create(self, folder: Folder, directory: int, mode: int | None) -> Staged:
        """Create a staged file on the file system of `folder`, whose descriptor is `directory`."""
        at, name = self._temporary(folder, directory)
        return Staged(os.open(name, _NEW, 0o666 if mode is None else 0o600, dir_fd=at), name, at)

    def _temporary(self, folder: Folder, directory: int) -> tuple[int, bytes]:
        """Return (directory, name) for a new staged entry."""
        if folder.near:
            return directory, STAGING + b"." + secrets.token_hex(8).encode()
        return self._run, b"%d" % next(self._counter)

    def place(self, staged: Staged, directory: int, info: Info, new: bool) -> None:
        """Close a file, set its mode and time, and rename it into place; if it is `new`, it replaces nothing."""
        descriptor = staged.descriptor
        try:
            if info.mode is not None:
                os.fchmod(descriptor, info.mode)
            if info.mtime_ns is not None:
                os.utime(descriptor, ns=(info.mtime_ns, info.mtime_ns))
        finally:
            os.close(descriptor)  # a network file system may report here that it is full
        self._name(staged.name, staged.directory, directory, info, new)

    def discard(self, staged: Staged, opened: bool = True) -> None:
        """Remove a staged file."""
        if opened:
            with contextlib.suppress(OSError):
                os.close(staged.descriptor)
        with contextlib.suppress(OSError):
            os.unlink(staged.name, dir_fd=staged.directory)

    def symlink(self, folder: Folder, directory: int, info: Info, target: str, new: bool) -> None:
        """Make a symbolic link, with its time."""
        at, name = self._temporary(folder, directory)
        os.symlink(os.fsencode(target), name, dir_fd=at)
        try:
            if info.mtime_ns is not None:
                os.utime(name, ns=(info.mtime_ns, info.mtime_ns), dir_fd=at, follow_symlinks=False)
            self._name(name, at, directory, info, new)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
            raise

    def _name(self, staged: bytes, at: int, directory: int, info: Info, new: bool) -> None:
        name = info.name
        try:
            if new:
                rename(staged, os.fsencode(name), NOREPLACE, at, directory)
            else:
                os.rename(staged, name, src_dir_fd=at, dst_dir_fd=directory)
        except FileExistsError:
            raise InTheWay("is there already") from None
        except OSError as exc:
            if not new or exc.errno != errno.EINVAL:
                raise
            self._link(staged, name, at, directory)  # a file system that cannot rename so, such as NFS
        self._changed[0] = 1

    def _link(self, staged: bytes, name: str, at: int, directory: int) -> None:
        try:  # a hard link never replaces anything
            os.link(staged, name, src_dir_fd=at, dst_dir_fd=directory, follow_symlinks=False)
        except FileExistsError:
            raise InTheWay("is there already") from None
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            os.rename(staged, name, src_dir_fd=at, dst_dir_fd=directory)
        else:
            os.unlink(staged, dir_fd=at)

    def dress(self, folder: Folder) -> bool:
        """Set the mode and time of a full directory; return whether they are ours to set."""
        handle = self.open(folder)
        try:
            known = folder.info.mode is not None or self._share is not None  # made by another share, perhaps
            ours = folder.made or self.begun or (known and self._existing != "keep")
            if ours:
                self._dress(handle, folder.info)
        finally:
            os.close(handle)
        return ours

    def _dress(self, handle: int, info: Info) -> None:
        descriptor = os.open(b".", OPEN, dir_fd=handle)
        try:
            if info.mtime_ns is not None:
                os.utime(descriptor, ns=(info.mtime_ns, info.mtime_ns))
            if info.mode is not None:
                shared = 0 if self._share is None else _OURS  # other shares may have files to write here
                os.fchmod(descriptor, info.mode | shared)
        finally:
            os.close(descriptor)

    # -- the end

    def finish(self, root: Info, dress: bool = False, more: bool = False, listing: Listing | None = None) -> None:
        """End a complete run and remove its staging directory; keep its journal if there is `more` to do. OSError.

        A share has divided `listing`: SourceError if another one, next to it, has divided something else.
        The destination gets the mode and time of `root` if this run, or the one that it resumed, has created it; with
        `dress` also if it was empty, or existing="overwrite", as far as permitted.
        """
        if listing is not None:
            self._said["listing"] = list(listing)
        self._end_span()
        if listing is not None:
            self._compare(listing)
        more = more or self._share is not None
        self._clear(note=self._noted == self._picks and not (more and self._mark))
        if self._made and self._picks and not self._changed[0] and not self.begun:  # nothing was selected
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        elif self._made or (self._share is not None and self._own and (dress or root.mode is not None)):
            self._dress(self._base.descriptor, root)
        elif dress and (self._own or self._existing == "overwrite"):
            with contextlib.suppress(PermissionError):  # another user's
                self._dress(self._base.descriptor, root)
        self.close()

    def _compare(self, listing: Listing) -> None:
        """Compare what we have divided with what complete shares next to ours have: once all end, all are compared."""
        assert self._share is not None
        index, count = self._share.index, self._share.count
        for other in {Share((index + step) % count, count) for step in (-1, 1)} - {self._share}:
            try:
                found = journal.complete_listing(self._staging, self._mark, other)
            except (OSError, *journal.DAMAGED) as exc:
                reason = reason_of(exc) if isinstance(exc, OSError) else "damaged"
                raise SourceError(
                    self.path, f"the journal of the share {other} cannot be read ({reason}), so whether files are "
                    "missing is not known: run both shares again",
                ) from exc
            if self._mark and found is not None and found != list(listing):
                raise SourceError(
                    self.path, f"the share {other} was made of other names or sizes: the source has changed, and "
                    "files may be missing; run all shares again",
                )  # fmt: skip

    def abandon(self) -> None:
        """End an interrupted run: finished entries stay, and its journal if it has a mark and wrote anything."""
        with contextlib.suppress(OSError):
            bare = self._is_empty()
            changed = self._mark and (self.begun or self._changed[0])
            if self._before and not changed and not bare:
                journal.write(self._note, self._before)
                changed = True
            else:
                with contextlib.suppress(OSError):  # of syncing: the journal says what is doubtful
                    self._end_span()
            self._clear(note=bare or not changed)
            if bare and self._made:
                os.rmdir(self.path)
        self.close()

    def distrust(self) -> None:
        """Have the next run write again what no run has synced: the kernel reports lost writes only once."""
        self._doubtful = [span for span in self._spans if span not in self._safe]
        self._said["boot"] = ""  # as after a reboot
        with contextlib.suppress(OSError):
            self._write_note()

    def _end_span(self) -> None:
        """Sync what a share has written, and note when it was written. OSError where it is not on the disk."""
        unsynced = [span for span in self._spans[:-1] if span not in self._safe]
        if self._share is not None and (self._changed[0] or unsynced):  # it may be run again on another node
            try:
                sync_file_system(self.path)
            except OSError:
                self.distrust()
                raise
        with contextlib.suppress(OSError):  # the span stays open: fewer entries count as ours
            self._spans[-1][1] = until = journal.changed_now(self._note)
            if self._share is not None:
                self._said["safe"] = [span for span in self._spans if span not in self._doubtful]
            self._write_note()
            journal.changed_now(self._note, until)  # later writes of others get a later ctime than ours

    def _clear(self, note: bool) -> None:
        """Remove the run's own directory, and with `note` the whole staging directory."""
        for name in os.listdir(self._run):
            try:
                os.unlink(name, dir_fd=self._run)
            except IsADirectoryError:  # of a forked process
                shutil.rmtree(name, dir_fd=self._run)
        os.rmdir(self._run_name, dir_fd=self._staging)
        if note:
            os.unlink(self._note_name, dir_fd=self._staging)
            with contextlib.suppress(OSError):  # another process has files in it
                os.rmdir(STAGING, dir_fd=self._base.descriptor)

    def close(self) -> None:
        """Close descriptors and release the lock; entries stay."""
        self._forget()
        if self._run >= 0:
            os.close(self._run)
            self._run = -1
        self._base.close()


def _within(status: os.stat_result, spans: journal.Spans) -> bool:
    """Return whether an entry was changed last within one of `spans`."""
    return any(since <= status.st_ctime_ns <= until for since, until in spans)


def _same(directory: int, name: str, status: os.stat_result, info: Info) -> bool:
    """Return whether an existing file has the kind, time, target and size of an entry."""
    if KINDS.get(stat.S_IFMT(status.st_mode)) is not info.kind:
        return False
    if info.mtime_ns is not None and status.st_mtime_ns != info.mtime_ns:
        coarse = status.st_mtime_ns % 10**9 == 0 and status.st_mtime_ns // 10**9 == info.mtime_ns // 10**9
        if not coarse:  # some file systems keep whole seconds
            return False
    if info.kind is Kind.SYMLINK:
        return os.readlink(name, dir_fd=directory) == (info.target or "")
    return info.size is None or status.st_size == info.size  # None: of a target, not requested yet
