"""The exit statuses of all commands: the table in the man pages and in docs/options.md (scripts/write-docs)."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """An exit status, the commands that end with it (none: all of them), and its meaning."""

    status: str
    commands: tuple[str, ...]
    meaning: str


_DIFFS = ("diff --exit-code",)
TABLE = (
    Row("0", (), "success"),
    Row("1", (), "failure: the last line on standard error says why"),
    Row(
        "1", ("check", "doctor"),
        "something is bad, damaged or cannot be read",
    ),
    Row("1", ("commit",), "NEW cannot hold something that was left out"),
    Row("1", ("copy",), "something could not be copied, or a pattern matches nothing"),
    Row("1", ("umount",), "a mount is in use, by the processes that are named"),
    Row("1", ("refresh",), "nothing was changed"),
    Row("1", _DIFFS, "there are differences"),
    Row("2", (), "a wrong option, argument or value"),
    Row("2", _DIFFS, "failure"),
    Row("125", ("run",), "SOURCE cannot be mounted, or other processes still use the mount"),
    Row("126", ("run",), "COMMAND cannot be executed"),
    Row("127", ("run",), "there is no such COMMAND"),
    Row("other", ("run",), "that of COMMAND; 128 + N if signal N ended it"),
    Row(
        "130", (),
        "interrupted by Ctrl-C; mount and commands that write files end so on SIGTERM and SIGHUP, too. These end "
        "others directly, which a shell reports as 143 and 129",
    ),
    Row("141", (), "the reader of standard output closed it, as `head` does"),
)  # fmt: skip
HELPER = (  # mount.zarrfs has the statuses of mount(8)
    Row("0", (), "mounted"),
    Row("1", (), "a wrong option or argument"),
    Row("8", (), "interrupted"),
    Row("32", (), "any other failure"),
)
