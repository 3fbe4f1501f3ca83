"""The destination directory of a copy. A file appears under its name once it is complete; none is written outside.

Each directory below is opened without following symbolic links (system/beneath.py), and every operation is relative
to its descriptor, so a process that swaps names meanwhile cannot redirect a write. Unfinished files are in a staging
directory of the run, in DIRECTORY/.zarrfs-staging. That also contains a journal (destination_journal.py), locked by
the run, with the mark of an unfinished run. All methods block; several threads may call them concurrently.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import stat
import threading
from typing import NamedTuple

from zarrfs.config.shares import Share
from zarrfs.copying import destination_journal as journal
from zarrfs.copying.destination_journal import OPEN, STAGING
from zarrfs.errors import UsageError, ZarrfsError, reason_of
from zarrfs.store.api import KINDS, Info, Kind, name_rule
from zarrfs.store.destination import sync_file_system
from zarrfs.store.staging import RESERVED, lock, remove_abandoned
from zarrfs.system.beneath import BaseDirectory
from zarrfs.system.processes import boot
from zarrfs.system.renaming import NOREPLACE, rename

EXISTING = ("refuse", "overwrite", "keep", "update", "differs")
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_OWNER_RWX = stat.S_IRWXU
_TRIES = 100  # retries while another process changes names
# Errors that every other file would fail with, too.
_FATAL = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
)
# Errors of link(2) after which rename(2) may succeed, such as on a FUSE file system without hard links, or between
# directories of AFS.
_NO_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV))


class InTheWay(ZarrfsError):
    """The error that the name of an entry cannot be used. `key`: the existing entry in its way, if the key differs."""

    def __init__(self, rule: str, key: str = "") -> None:
        self.key = key
        super().__init__(rule)


def ends_all(exc: BaseException) -> bool:
    """Return whether a failure prevents every further write, as a full disk does."""
    return isinstance(exc, OSError) and exc.errno in _FATAL


class Folder:
    """A directory of the copy. It is finished when its entries and its listing have dropped their holds."""

    __slots__ = ("fresh", "holds", "info", "key", "made", "parent", "stages_itself", "wanted")

    def __init__(self, key: str, info: Info, parent: Folder | None) -> None:
        self.key, self.info, self.parent = key, info, parent
        self.holds = 1
        self.wanted = False  # whether to create it, because the directory, or an entry below it, was selected
        self.made = False  # whether this run created it
        self.fresh = False  # whether it contains nothing that existed before this run
        self.stages_itself = False  # on another file system than the staging directory: it contains staged files

    def want(self) -> None:
        """Mark the directory and its parents as wanted, because the directory or an entry in it was selected."""
        at: Folder | None = self
        while at is not None and not at.wanted:
            at.wanted = True
            at = at.parent


def broken_rule(name: str, folder: Folder) -> str | None:
    """Return the rule that a name, which may come from an untrusted store, breaks in `folder`; None if it is valid."""
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
    """A staged file: an open descriptor for reading and writing, its name, and the descriptor of its directory."""

    descriptor: int
    name: bytes
    directory: int


class DestinationDirectory:
    """The directory `path`, created if it is missing, and locked until finish() or abandon().

    `existing` (one of EXISTING) says what happens to existing entries. A run resumes an interrupted run with the same
    `mark`. If that run selected other entries (`picks`; "": everything), it still counts as unfinished after this one,
    unless this run selects everything. Runs of other shares may write to the directory at the same time.

    Raises UsageError if the directory cannot be used, or another run is writing to it.
    """

    def __init__(
        self, path: str, existing: str = "refuse", mark: str = "", picks: str = "", share: Share | None = None
    ) -> None:
        self.path, self._existing, self._mark, self._picks = path, existing, mark, picks
        self._share, self._note_name = share, journal.name_of(share)
        self.resumed = self._made = False
        self.begun = False  # whether there is an unfinished run with this mark
        self._journal_fields: dict[str, object] = {}  # the journal of this run, without its spans
        self._spans: journal.Spans = []  # the spans of the journal of this run; the last one is its own
        self._resumed_spans: journal.Spans = []  # spans of the runs that this run resumes
        self._safe: journal.Spans = []  # spans whose entries were synced to disk
        self._doubtful: journal.Spans = []  # spans whose entries a reboot may have lost
        self._noted, self._before = picks, b""  # of the unfinished run: its picks; its journal, if the mark differs
        self._changed = False  # whether any entry was placed
        self._may_set_root = False  # whether this run may set the mode and time of the root
        self._counter = itertools.count()
        self._lock = threading.Lock()
        self._run = self._journal = self._staging = -1
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
        """Lock the directory, read its journal, and create the staging directory of the run."""
        self._status = os.fstat(self._base.descriptor)
        self._lock_journal()
        if self._share is None:
            journal.remove_abandoned_runs(self._staging)
        elif not self._may_set_root:
            self._may_set_root = journal.owned_by_a_share(self._staging, self._mark)
        self._make_run()
        if self._share is not None:
            # the next run of this share removes only this staging directory, because there may be very many shares
            self._journal_fields["run"] = self._run_name.decode()
            self._write_journal()
        self._device = os.fstat(self._run).st_dev

    def _make_run(self) -> None:
        """Create and lock the staging directory of the run. Before it is locked, another run may remove it."""
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

    def _lock_journal(self) -> None:
        """Open, lock and read the journal; create the staging directory first if needed. Raise UsageError, OSError."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(STAGING, 0o700, dir_fd=self._base.descriptor)
            try:
                self._staging = os.open(STAGING, OPEN, dir_fd=self._base.descriptor)
                fresh = self._open_journal()
            except FileNotFoundError:  # another run has just ended, and removed the staging directory
                self._forget()
                continue
            except NotADirectoryError:
                raise UsageError(f"{self.path}: {RESERVED} in it, which is reserved, is no directory") from None
            if not journal.lock_note(self._journal):
                what = "another run" if self._share is None else f"another run of the share {self._share}"
                raise UsageError(f"{self.path}: {what} is writing to it")
            if os.fstat(self._journal).st_nlink:
                # after locking, because an earlier run may have written until it released the lock
                self._may_set_root = self._is_empty()
                if not fresh and not journal.alone(self._journal):
                    raise UsageError(f"{self.path}: its {RESERVED} holds a journal that is not this user's alone")
                self._read_journal(believed=journal.alone(self._staging))
                return
            self._forget()
        raise OSError(errno.EBUSY, "the staging directory keeps vanishing")

    def _is_empty(self) -> bool:
        look = os.open(b".", OPEN, dir_fd=self._base.descriptor)
        try:
            return not set(os.listdir(look)) - {RESERVED}
        finally:
            os.close(look)

    def _open_journal(self) -> bool:
        """Open the journal; return whether this run created it: then it is ours, even if a server squashes root."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._journal = os.open(self._note_name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._staging)
        except FileExistsError:
            self._journal = os.open(self._note_name, flags, dir_fd=self._staging)
            return False
        return True

    def _forget(self) -> None:
        for descriptor in (self._journal, self._staging):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal = self._staging = -1

    def _read_journal(self, believed: bool) -> None:
        """Resume the run that left the journal if it has the mark of this run, and write a new journal.

        Unless it is `believed`, because other users may write to the staging directory, the old journal is ignored.
        Entries that the earlier run wrote before a reboot, and did not sync, are written again: they may not have
        reached the disk.
        """
        now, before, spans = boot(), journal.read(self._journal) if believed else b"", []
        left: str | None = None
        since = now
        try:
            said = json.loads(before)
            left = None if self._share is None else journal.run_of(said)
            if self._mark and said["mark"] == self._mark:
                own, then, spans = bool(said["own"]), said["boot"], journal.spans_of(said, self._staging)
                self._safe = [[int(start), int(stop)] for start, stop in said.get("safe", ())]
                doubtful = [span for span in spans if span not in self._safe]
                since = then if doubtful else now  # a boot id: the earlier run's, unless all of its entries are synced
                self._resumed_spans = spans
                self.begun, self._may_set_root, self._made = True, own, self._made or bool(said.get("made"))
                if self._picks:
                    self._noted = said.get("picks", "")
                self.resumed = since == now
                if not self.resumed:
                    self._doubtful = doubtful
            elif said["mark"]:
                self._before = before
        except journal.DAMAGED:
            pass
        self._journal_fields = {
            "mark": self._mark, "picks": self._noted, "own": self._may_set_root, "made": self._made, "boot": since,
        }  # fmt: skip
        if self._safe:
            self._journal_fields["safe"] = self._safe
        if left is not None:
            remove_abandoned(self._staging, os.fsencode(left))
        # begin the span in a new tick of the file system's clock, after every earlier change
        self._spans = [*spans, [journal.changed_now(self._journal, journal.changed_now(self._journal)), 0]]
        self._write_journal()

    def _write_journal(self) -> None:
        journal.write(self._journal, json.dumps({**self._journal_fields, "spans": self._spans}).encode())

    # -- directories

    def root(self, info: Info) -> Folder:
        """Return the folder of the destination itself, for the root of a store."""
        folder = Folder("", info, None)
        folder.wanted = True
        folder.made = self._made
        folder.fresh = self._may_set_root and not self.begun and self._share is None
        return folder

    def open(self, folder: Folder) -> int:
        """Open `folder` with O_PATH; create it and its parents if they are missing. Raise OSError, InTheWay."""
        try:
            return self._entered(folder, self._base.directory(os.fsencode(folder.key)))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # open it name by name, to create directories, or to find the one that cannot be opened
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
                # without a mode in the store, the umask decides; otherwise set_attributes() sets the mode at the end
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o777 if folder.info.mode is None else 0o700, dir_fd=above)
                    folder.stages_itself = folder.parent is not None and folder.parent.stages_itself
                    folder.made = folder.fresh = True
                    self._changed = True
            except NotADirectoryError:
                if self._existing != "overwrite":
                    raise InTheWay("is there already, and is no directory", folder.key) from None
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=above)
        raise OSError(errno.EBUSY, "its name keeps changing", folder.key)

    def _entered(self, folder: Folder, found: int) -> int:
        """Prepare a directory that existed before this run, and return its descriptor."""
        if folder.fresh or folder.parent is None:
            return found
        status = os.fstat(found)
        closed = status.st_uid == os.geteuid() != 0 and status.st_mode & _OWNER_RWX != _OWNER_RWX
        if closed and folder.info.mode is not None and self._existing != "keep":  # writable until set_attributes()
            os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(status.st_mode) | _OWNER_RWX)
        elsewhere = status.st_dev != self._device
        with self._lock:  # otherwise another thread could remove a new staged file as abandoned
            if elsewhere and not folder.stages_itself:  # remove staged files of a killed run
                for entry in os.listdir(f"/proc/self/fd/{found}"):
                    if entry.startswith(RESERVED + "."):
                        remove_abandoned(found, os.fsencode(entry))
            folder.stages_itself = elsewhere
        return found

    # -- entries

    def compare_existing(self, directory: int, info: Info) -> str:
        """Decide what to do about an entry that is not a directory: "new", "replace", "kept" or "resumed".

        An entry that is "kept" or "resumed" need not be written. Removes an empty directory that is to be replaced.
        Raise InTheWay if the existing entry may not be replaced, and OSError.
        """
        name = info.name
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return "new"
        # An entry of the right size and time may have other bytes if it is older than the first of the resumed runs,
        # because all files of a reference set have the same time. So it must have changed during one of the runs, or,
        # if the store has a time for it, since the first one began: then it may also be a copy of what they wrote.
        # Times of change on another file system come from another clock, and are not compared.
        since = self._resumed_spans[0][0] if self._resumed_spans and status.st_dev == self._device else 0
        timed = info.mtime_ns is not None or info.kind is not Kind.FILE
        known = _within(status, self._resumed_spans) or (timed and status.st_ctime_ns >= since)
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
            # if its document was touched, an entry without a time of its own has a new time
            timeless = info._replace(mtime_ns=None)
            older = _within(status, self._resumed_spans) and _same(directory, name, status, timeless)
            if not older and not _within(status, self._doubtful):
                raise InTheWay("is there already")
            return "replace"
        return "kept" if self._stays(directory, status, info) else "replace"

    def _stays(self, directory: int, status: os.stat_result, info: Info) -> bool:
        """Return whether an existing entry stays, with existing="differs" or "update"."""
        if self._existing == "differs":
            return stat.S_IMODE(status.st_mode) == info.mode and _same(directory, info.name, status, info)
        return self._existing == "update" and (info.mtime_ns is None or status.st_mtime_ns >= info.mtime_ns)

    def create(self, folder: Folder, directory: int, mode: int | None) -> Staged:
        """Create a staged file on the file system of `folder`, whose descriptor is `directory`. Raise OSError."""
        at, name = self._temporary(folder, directory)
        return Staged(os.open(name, _NEW, 0o666 if mode is None else 0o600, dir_fd=at), name, at)

    def _temporary(self, folder: Folder, directory: int) -> tuple[int, bytes]:
        """Return (descriptor of the directory, name) for a new staged entry."""
        if folder.stages_itself:
            return directory, STAGING + b"." + secrets.token_hex(8).encode()
        return self._run, b"%d" % next(self._counter)

    def place(self, staged: Staged, directory: int, info: Info, new: bool) -> None:
        """Set the mode and time of a staged file, close it, and rename it into place; a `new` file replaces nothing.

        Raise OSError, and InTheWay if a `new` file would replace an entry. On a file system with neither
        RENAME_NOREPLACE nor hard links, a `new` file may replace an entry that appeared meanwhile.
        """
        descriptor = staged.descriptor
        try:
            if info.mode is not None:
                os.fchmod(descriptor, info.mode)
            if info.mtime_ns is not None:
                os.utime(descriptor, ns=(info.mtime_ns, info.mtime_ns))
        finally:
            os.close(descriptor)  # a network file system may report here that it is full
        self._rename_into_place(staged.name, staged.directory, directory, info, new)

    def discard(self, staged: Staged, opened: bool = True) -> None:
        """Remove a staged file, and close its descriptor if that is still `opened`."""
        if opened:
            with contextlib.suppress(OSError):
                os.close(staged.descriptor)
        with contextlib.suppress(OSError):
            os.unlink(staged.name, dir_fd=staged.directory)

    def symlink(self, folder: Folder, directory: int, info: Info, target: str, new: bool) -> None:
        """Create a symbolic link with the time of `info`; errors and `new` are those of place()."""
        at, name = self._temporary(folder, directory)
        os.symlink(os.fsencode(target), name, dir_fd=at)
        try:
            if info.mtime_ns is not None:
                os.utime(name, ns=(info.mtime_ns, info.mtime_ns), dir_fd=at, follow_symlinks=False)
            self._rename_into_place(name, at, directory, info, new)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
            raise

    def _rename_into_place(self, staged: bytes, at: int, directory: int, info: Info, new: bool) -> None:
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
            self._link(staged, name, at, directory)  # the file system has no RENAME_NOREPLACE: NFS, for example
        self._changed = True

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

    def set_attributes(self, folder: Folder) -> bool:
        """Set the mode and time of a complete directory; return False if it existed and keeps its own."""
        handle = self.open(folder)
        try:
            known = folder.info.mode is not None or self._share is not None  # another share may have created it
            ours = folder.made or self.begun or (known and self._existing != "keep")
            if ours:
                self._set_mode_and_time(handle, folder.info)
        finally:
            os.close(handle)
        return ours

    def _set_mode_and_time(self, handle: int, info: Info) -> None:
        descriptor = os.open(b".", OPEN, dir_fd=handle)
        try:
            if info.mtime_ns is not None:
                os.utime(descriptor, ns=(info.mtime_ns, info.mtime_ns))
            if info.mode is not None:
                shared = 0 if self._share is None else _OWNER_RWX  # other shares may have files to write here
                os.fchmod(descriptor, info.mode | shared)
        finally:
            os.close(descriptor)

    # -- the end

    def finish(self, root: Info, dress: bool = False, more: bool = False) -> None:
        """End a complete run and remove its staging directory; keep the journal of a share, or if `more` will follow.

        The destination gets the mode and time of `root` if this run, or the run that it resumed, has created it; with
        `dress` also if it was empty, or existing="overwrite", as far as permitted. Raise OSError.
        """
        self._end_span()
        more = more or self._share is not None
        self._clear(note=self._noted == self._picks and not (more and self._mark))
        if self._made and self._picks and not self._changed and not self.begun:  # nothing was selected
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
        elif self._made or (self._share is not None and self._may_set_root and (dress or root.mode is not None)):
            self._set_mode_and_time(self._base.descriptor, root)
        elif dress and (self._may_set_root or self._existing == "overwrite"):
            with contextlib.suppress(PermissionError):  # the directory belongs to another user
                self._set_mode_and_time(self._base.descriptor, root)
        self.close()

    def abandon(self) -> None:
        """End an interrupted run. Finished entries stay; so does the journal if the run has a mark and wrote anything.

        If its journal does not stay, restore the journal of an unfinished run with another mark.
        """
        with contextlib.suppress(OSError):
            bare = self._is_empty()
            changed = self._mark and (self.begun or self._changed)
            if self._before and not changed and not bare:
                journal.write(self._journal, self._before)
                changed = True
            else:
                with contextlib.suppress(OSError):  # if syncing fails, the journal says which entries are doubtful
                    self._end_span()
            self._clear(note=bare or not changed)
            if bare and self._made:
                os.rmdir(self.path)
        self.close()

    def distrust(self) -> None:
        """Make the next run write all unsynced entries again, because the kernel reports lost writes only once."""
        self._doubtful = [span for span in self._spans if span not in self._safe]
        self._journal_fields["boot"] = ""  # so that the next run assumes a reboot
        with contextlib.suppress(OSError):
            self._write_journal()

    def _end_span(self) -> None:
        """End the span of this run in the journal; for a share, sync entries first. Raise OSError if syncing fails."""
        unsynced = [span for span in self._spans[:-1] if span not in self._safe]
        if self._share is not None and (self._changed or unsynced):  # the share may be rerun on another node
            try:
                sync_file_system(self.path)
            except OSError:
                self.distrust()
                raise
        with contextlib.suppress(OSError):  # if the span stays open, fewer entries count as written by this run
            self._spans[-1][1] = until = journal.changed_now(self._journal)
            if self._share is not None:
                self._journal_fields["safe"] = [span for span in self._spans if span not in self._doubtful]
            self._write_journal()
            journal.changed_now(self._journal, until)  # wait: later writes of other processes get a later ctime

    def _clear(self, note: bool) -> None:
        """Remove the staging directory of this run; with `note` also the journal, and .zarrfs-staging if empty."""
        for name in os.listdir(self._run):
            os.unlink(name, dir_fd=self._run)
        os.rmdir(self._run_name, dir_fd=self._staging)
        if note:
            os.unlink(self._note_name, dir_fd=self._staging)
            with contextlib.suppress(OSError):  # not empty: another run uses it
                os.rmdir(STAGING, dir_fd=self._base.descriptor)

    def close(self) -> None:
        """Close descriptors and release the lock; entries stay."""
        self._forget()
        if self._run >= 0:
            os.close(self._run)
            self._run = -1
        self._base.close()


def _within(status: os.stat_result, spans: journal.Spans) -> bool:
    """Return whether the ctime of an entry is within one of `spans`."""
    return any(since <= status.st_ctime_ns <= until for since, until in spans)


def _same(directory: int, name: str, status: os.stat_result, info: Info) -> bool:
    """Return whether an existing entry has the kind, time, target and size of `info`, as far as those are known."""
    if KINDS.get(stat.S_IFMT(status.st_mode)) is not info.kind:
        return False
    if info.mtime_ns is not None and status.st_mtime_ns != info.mtime_ns:
        coarse = status.st_mtime_ns % 10**9 == 0 and status.st_mtime_ns // 10**9 == info.mtime_ns // 10**9
        if not coarse:  # some file systems keep whole seconds
            return False
    if info.kind is Kind.SYMLINK:
        return os.readlink(name, dir_fd=directory) == (info.target or "")
    return info.size is None or status.st_size == info.size  # None: not requested from the target yet
