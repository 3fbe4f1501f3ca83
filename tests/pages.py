"""Transcripts in the documentation: run their commands, and compare the output with the page.

A block whose first line begins with "$ " is a transcript: commands, each followed by its output, in which a line "..."
matches any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conftest import PROGRAM

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_END = "-- the end of a command --"
# parts of any output that differ from run to run: times of files, times in logs, pids
_MASKS = (
    r"\b[A-Z][a-z]{2} [ \d]\d +(?:\d\d:\d\d|\d{4})\b",
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?",
    r"(?<=\bpid )\d+",
)


def blocks(page: str) -> list[str]:
    """Return the fenced blocks of a page's text."""
    return re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[tuple[str, str]]:
    """Return (command, output) of a transcript. A command continues after \\, && or |, and in a here document."""
    found: list[tuple[str, str]] = []
    until, goes_on = "", False
    for line in text.splitlines(keepends=True):
        if until or goes_on:
            found[-1] = found[-1][0] + line, ""
            until = "" if line == until else until
        elif line.startswith("$ "):
            found.append((line[2:], ""))
            here = re.search(r"<<-?'?(\w+)'?", line)
            until = f"{here[1]}\n" if here else ""
        else:
            found[-1] = found[-1][0], found[-1][1] + line
            continue
        goes_on = not until and re.search(r"(\\|&&|\|)\n$", line) is not None
    return found


def check_transcripts(page: str, directory: Path, names: Mapping[str, str], masks: Sequence[str] = ()) -> None:
    """Run all transcripts of a page's text in one shell, in `directory`; compare the output.

    `names` maps names in the page to those of this run. `masks` are patterns of parts that differ from run to run.
    """
    expected = [pair for text in blocks(page) if text.startswith("$ ") for pair in commands(text)]
    assert expected
    script = "exec 2>&1\n" + "".join(f"{_renamed(command, names)}echo '{_END}'\n" for command, _ in expected)
    path = ":".join((os.path.dirname(PROGRAM), os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin:/sbin"))
    try:
        done = subprocess.run(
            ["bash", "-c", script], cwd=directory, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            env={**os.environ, "PATH": path, "LC_ALL": "C", "TZ": "UTC"}, timeout=500, check=False,
        )  # fmt: skip
    finally:
        _unmount_all(directory)
    found = _renamed(done.stdout, {here: name for name, here in names.items()}).split(f"{_END}\n")
    for (command, output), said in zip(expected, found, strict=False):
        wanted = _masked(output, masks).splitlines(keepends=True)
        pattern = "".join("(?:.*\n)*" if line == "...\n" else re.escape(line) for line in wanted)
        assert re.fullmatch(pattern, _masked(said, masks)), f"$ {command}{said}instead of\n{output}"
    assert len(found) == len(expected) + 1, f"the shell ended at {expected[len(found) - 1][0]}"


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w-])", lambda _match, name=name: names[name], text)
    return text


def _masked(text: str, masks: Sequence[str]) -> str:
    for mask in (*masks, *_MASKS):
        text = re.sub(mask, "*", text)
    return text


def _unmount_all(directory: Path) -> None:
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4] for line in file]
    for point in reversed(points):
        if point.startswith(f"{directory}/"):
            subprocess.run(["umount", "-l", point], capture_output=True, check=False)
