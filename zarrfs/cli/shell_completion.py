"""Shell completion: the candidates after TAB. Imported only when a shell asks for them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    add_completion_class,
    get_completion_class,
)

from zarrfs.config.options import TABLE
from zarrfs.config.values import flag

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

VARIABLE = "_ZARRFS_COMPLETE"  # click's variable: set when a shell runs zarrfs for completion
_FILES = ("source", "sources", "archive", "file", "other", "paths", "dest", "place", "command")
_PATHS = ("DIR", "FILE", "PLACE")  # metavars of options whose values are paths
_BASH = """\
_zarrfs_completion() {
    local kind value line=${COMP_LINE:0:COMP_POINT} word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    while IFS=, read -r kind value; do
        case $kind in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            path) COMPREPLY+=("$value"); compopt -o filenames ;;
            *) COMPREPLY+=("$value") ;;
        esac
    done < <(ZARRFS_LINE=$line ZARRFS_WORD=$word %(complete_var)s=bash_complete "$1")
    [[ ${#COMPREPLY[@]} -ne 1 || ${COMPREPLY[0]} != *= ]] || compopt -o nospace
}
complete -o nosort -F _zarrfs_completion %(prog_name)s
"""
_FISH = """\
function _zarrfs_completion
    for line in (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) COMP_CWORD=(commandline -t) \\
            %(prog_name)s)
        set -l part (string split -m 1 , -- $line)
        switch $part[1]
            case dir
                __fish_complete_directories $part[2]
            case file
                __fish_complete_path $part[2]
            case '*'
                echo $part[2]
        end
    end
end
complete --no-files --command %(prog_name)s --arguments "(_zarrfs_completion)"
"""


class Bash(BashComplete):
    """Completion for bash. Bash breaks words at "=" and ":", so the line is split here instead."""

    source_template = _BASH

    def source(self) -> str:
        """Return the script, without click's check of the shell's version."""
        return self.source_template % self.source_vars()

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return (the words before the cursor's, the word at the cursor)."""
        words = _split(os.environ.get("ZARRFS_LINE", ""))
        return words[1:-1], words[-1] if words else ""

    def format_completion(self, item: CompletionItem) -> str:
        """Return the line "TYPE,VALUE" of a candidate, as the script reads it.

        VALUE begins after the last "=" or ":" of the word that was typed, because bash replaces only that part.
        """
        incomplete = self.get_completion_args()[1]
        if item.type in ("file", "dir"):
            return f"{item.type},"  # bash completes paths itself
        word = os.environ.get("ZARRFS_WORD", "").strip("=:")
        broken = len(incomplete) - len(word) if incomplete.endswith(word) else 0
        return f"{item.type},{item.value[broken:]}"


class Fish(FishComplete):
    """Completion for fish, with values that may contain commas."""

    source_template = _FISH


add_completion_class(Bash, "bash")
add_completion_class(Fish, "fish")


def script(shell: str) -> str:
    """Return the script that sets up completion in `shell`."""
    found = get_completion_class(shell)
    assert found is not None
    return found(click.get_current_context().find_root().command, {}, "zarrfs", VARIABLE).source()


def add_completers(command: click.Command) -> None:
    """Attach completers to the parameters of a command."""
    for one in command.params:
        completer = _completer(one)
        if completer is not None:
            one._custom_shell_complete = completer


def _completer(parameter: click.Parameter) -> Completer | None:
    if isinstance(parameter, click.Argument):
        return _mountpoints if parameter.name == "mountpoint" else _paths if parameter.name in _FILES else None
    name = (parameter.name or "").removeprefix("option_")
    if name == "items":
        return _items
    if name in TABLE and (choices := _choices(name)):
        return lambda ctx, param, incomplete: [CompletionItem(one) for one in choices if one.startswith(incomplete)]
    return _paths if parameter.metavar in _PATHS and not isinstance(parameter.type, click.Choice) else None


def _paths(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def _mountpoints(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a directory for `zarrfs mount`, a zarrfs mount for every other command."""
    if ctx.info_name == "mount":
        return [CompletionItem(incomplete, type="dir")]
    from zarrfs.system.mounts import FSTYPE, mounts

    found = sorted({mount.mountpoint for mount in mounts() if mount.fstype == FSTYPE})
    quoted = os.environ.get(VARIABLE, "").startswith("bash")  # the other shells quote candidates themselves
    kind = "path" if quoted else "plain"
    return [CompletionItem(path, type=kind) for path in found if path.startswith(incomplete) and path.isprintable()]


def _items(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last item of a mount(8) option list."""
    before, comma, item = incomplete.rpartition(",")
    name, equals, value = item.partition("=")
    if equals and name in TABLE and TABLE[name].metadata["metavar"] in _PATHS:
        if os.environ.get(VARIABLE, "").startswith("bash"):  # for bash the word begins after "="
            return _paths(ctx, parameter, value)
        candidates = [f"{name}={one}" for one in _entries(value)]
    elif equals and name in ("branch", "tag"):
        candidates = [f"{name}={one}" for one in _refs(ctx, name) if one.startswith(value)]
    elif equals:
        candidates = [f"{name}={one}" for one in _choices(name) if one.startswith(value)]
    else:
        names = [one for one in TABLE if one.startswith(name)]
        candidates = [one if TABLE[one].metadata["parse"] is flag else f"{one}=" for one in names]
    return [CompletionItem(before + comma + one) for one in candidates]


def _refs(ctx: click.Context, kind: str) -> list[str]:
    """Return the branches or tags of the Icechunk repository on the command line; none if it is remote."""
    source = ctx.params.get("source") or next(iter(ctx.args), None)  # before a lone -o, click leaves it in args
    if not isinstance(source, str) or "://" in source:
        return []
    from zarrfs.sources.icechunk import local_refs

    return [one for one in local_refs(os.path.expanduser(source), kind) if one.isprintable() and "," not in one]


def _entries(path: str) -> list[str]:
    """Return the paths that begin with `path`, as the user spells it; directories end with a slash."""
    directory, _, name = path.rpartition("/")
    above = f"{directory}/" if "/" in path else ""
    try:
        with os.scandir(above or ".") as entries:
            found = [above + one.name + ("/" if one.is_dir() else "") for one in entries if one.name.startswith(name)]
    except OSError:
        return []
    return sorted(one for one in found if one.isprintable() and (name or one[len(above)] != "."))


def _choices(name: str) -> tuple[str, ...]:
    """Return the words that an option accepts; none if it takes free text."""
    parser: Any = TABLE[name].metadata["parse"] if name in TABLE else None
    found: tuple[str, ...] = getattr(parser, "choices", ())
    return found


def _split(line: str) -> list[str]:
    """Split an unfinished command line. The last word is the one at the cursor; it may be empty."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:  # an open quote
        words.append(lexer.token)
    return words if line and not line[-1].isspace() else [*words, ""]
