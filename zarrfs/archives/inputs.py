"""What is below the paths that were named: directories, and the names in them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator

from zarrfs.archives.contents import Contents, Part
from zarrfs.archives.create_options import Making, failed, path_rule, reading, time_rule
from zarrfs.archives.document_writer import encoded
from zarrfs.errors import UsageError

BATCH = 64  # files of one task


def named(paths: Iterable[str]) -> list[str]:
    """The paths without "." and "//", each once, and none that another one has in it. UsageError."""
    found: dict[str, None] = {}
    for path in paths:
        if not path or "\0" in path:
            raise UsageError("an empty path" if not path else f"{path!r}: a path with a NUL")
        if path.startswith("/"):
            more = f"say -C / {path.lstrip('/') or '.'}"
            raise UsageError(f"{path}: paths in an archive are relative: {more}, or -C with its directory")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise UsageError(f"{path}: no path in an archive has .. in it: use -C to start elsewhere")
        found["/".join(parts)] = None
    return [path for path in found if not any(above in found for above in _above(path))]


def _above(path: str) -> Iterator[str]:
    if path:
        yield ""
        yield from (path[:at] for at, character in enumerate(path) if character == "/")


class Walk:
    """Goes through the directory that `contents` reads, without opening files."""

    def __init__(self, descriptor: int, base: str, making: Making, contents: Contents) -> None:
        self._descriptor, self._base, self._making, self._contents = descriptor, base, making, contents
        self._inodes = {inode for _device, inode in making.own}
        self._leave_out = [] if making.leave_out is None else [making.leave_out]
        if making.excludes:
            from zarrfs.store.keyglobs import Globs

            self._leave_out.append(Globs(making.excludes).match)

    def tasks(self, paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[tuple[str, list[Part]]]:
        """What `contents` is to read, in an order that depends on names alone. SourceError, UsageError."""
        batch: list[Part] = []
        count = 0
        for part in self.parts(paths, warn):
            batch.append(part)
            count += len(part[3]) + len(part[4]) + 1
            if count >= BATCH:
                yield "parts", batch
                batch, count = [], 0
        if batch:
            yield "parts", batch

    def parts(self, paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[Part]:
        """As tasks(), directory by directory, and up to BATCH files of one at a time."""
        for path in paths:
            if any(leave_out(path) for leave_out in self._leave_out):
                continue
            with reading(self._base, path):
                status = os.stat(path or ".", dir_fd=self._descriptor, follow_symlinks=False)
            directory, _, name = path.rpartition("/")
            if (status.st_dev, status.st_ino) in self._making.own:
                raise UsageError(f"{path or '.'}: is written meanwhile, so it cannot be archived")
            if stat.S_ISDIR(status.st_mode):
                yield from self._below(path, warn)
            elif stat.S_ISREG(status.st_mode):
                yield None, directory, None, [name], []
            else:
                yield None, directory, None, [], [name]

    def _below(self, top: str, warn: Callable[[str], None]) -> Iterator[Part]:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            rule = path_rule(path)
            if rule is not None:
                self._contents.refuse(path, rule, warn)
                continue
            with self._contents.opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                status = os.fstat(descriptor)
                rule = time_rule(status.st_mtime_ns)
                if rule is not None:
                    self._contents.refuse(path, rule, warn)
                    continue
                with reading(self._base, path):
                    files, others, directories = self._sorted(descriptor, path, warn)
            waiting += reversed(directories)
            own = None
            if path:  # RFC 37 has no path for the root
                fields = {"mode": status.st_mode, "mtime": status.st_mtime_ns // 10**9}
                own = encoded(path, fields, self._making.dictionary)
            identity = status.st_dev, status.st_ino
            for at in range(0, len(files) or 1, BATCH):
                yield own, path, identity, files[at : at + BATCH], []
                own = None
            for at in range(0, len(others), BATCH):
                yield None, path, identity, [], others[at : at + BATCH]

    def _sorted(
        self, descriptor: int, path: str, warn: Callable[[str], None]
    ) -> tuple[list[str], list[str], list[str]]:
        """The regular files, what else, and the paths of the directories of a directory, sorted."""
        files: list[str] = []
        others: list[str] = []
        directories: list[str] = []
        prefix = f"{path}/" if path else ""
        with os.scandir(descriptor) as entries:
            for entry in entries:
                name = entry.name
                if self._leave_out and any(leave_out(prefix + name) for leave_out in self._leave_out):
                    continue
                if entry.inode() in self._inodes and self._is_own(entry):
                    warn(f"{failed(self._base, prefix + name, 'is written meanwhile')}: left out")
                elif entry.is_file(follow_symlinks=False):
                    files.append(name)
                elif entry.is_dir(follow_symlinks=False):
                    directories.append(prefix + name)
                else:
                    others.append(name)
        return sorted(files), sorted(others), sorted(directories)

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            return (status.st_dev, status.st_ino) in self._making.own
        return False
