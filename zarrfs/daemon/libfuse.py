"""The mount itself: options for libfuse, and its reasons, which it only prints, as errors."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import pyfuse3

from zarrfs.errors import MountError
from zarrfs.mountpoints import requirements
from zarrfs.options import Options


def mount(operations: pyfuse3.Operations, mountpoint: str, chosen: set[str]) -> None:
    """Mount with libfuse's options `chosen`; MountError with its reason, in one line."""
    with _captured_errors() as said:
        try:
            pyfuse3.init(operations, mountpoint, chosen)
        except RuntimeError as exc:
            raise MountError(requirements.why_refused(said())) from exc


def options_of(source: str, options: Options, kernel: Sequence[str], writable: bool) -> set[str]:
    """What goes to libfuse and, through it, to the kernel, whose flags are in `kernel`."""
    name = (options.fsname or source).replace("\\", "\\\\").replace(",", "\\,")
    chosen = {f"fsname={name}", "subtype=zarrfs", "default_permissions", *kernel}
    chosen |= set() if writable else {"ro"}
    chosen |= {"nosuid"} if "suid" not in kernel else set()
    chosen |= {"nodev"} if "dev" not in kernel else set()
    if options.allow_other:
        chosen.add("allow_other")
    elif options.allow_root:
        chosen.add("allow_root")
    if options.auto_unmount:
        chosen.add("auto_unmount")
    return chosen


@contextlib.contextmanager
def _captured_errors() -> Iterator[Callable[[], str]]:
    """Keep what goes to standard error back, and let the body look at it; it is told in the end if nothing failed.

    What fusermount3 leaves behind for auto_unmount keeps this in place of our standard error: others wait for its end.
    """
    sys.stderr.flush()
    terminal, kept = os.dup(2), os.memfd_create("stderr")
    os.dup2(kept, 2)

    def said() -> str:
        return os.pread(kept, 1 << 16, 0).decode(errors="replace")

    try:
        yield said
        with contextlib.suppress(OSError):
            os.write(terminal, said().encode())
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(kept)
