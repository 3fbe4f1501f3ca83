"""The code blocks of the documentation's pages, and a check that runs their transcripts and compares the output.

A block whose first line begins with "$ " is a transcript: commands, each followed by its output, in which a line "..."
matches any lines. lines() returns the commands of all other blocks, which tests/mounts/test_every_line.py runs.
SHOWN lists the blocks that are not run, with the reason.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import forkserver
from tests.conftest import PROGRAM

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARK = "-- the end of a command --"
# Parts of any output that differ from run to run: times of files, times in logs, pids, ports of this machine
MASKS = (
    r"\b[A-Z][a-z]{2} [ \d]\d +(?:\d\d:\d\d|\d{4})\b",
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?",
    r"(?<=\bpid )\d+",
    r"(?<=127\.0\.0\.1:)\d+",
)


DATA = ("yaml", "json", "ini", "diff")  # languages of blocks without commands
# Other blocks without commands, or with commands that are not run unchanged: how the block begins, and the reason
SHOWN = {
    "/data/combined.json  /mnt/data": "a line of fstab; fstab.md has those that are run",
    "class Store:": "the interface of stores",
    "async def read(handle": "the way of a read, shortened",
    "combined.parq/.zmetadata": "files of a set",
    "scripts/demo": "tests/mounts/test_every_line.py runs the demo; scripts/test is what runs this",
    "journalctl -t": "tests/mounts/test_logs.py asks a journal so",
    "cd /opt/zarrfs": "a site's paths: tests/slurm and tests/flux install the same files",
    "install -d /etc/flux": "a site's paths: tests/flux runs prolog and epilog",
    "[job-manager]": "a file of Flux",
    "flux archive create --name": "tests/flux/test_flux.py runs both commands where there is a Flux",
    "Prolog=": "a file of Slurm, as scripts/slurm/slurm.conf.sample: tests/slurm runs with it",
    "era5  ": "a table of data sets: tests/slurm has one",
    "#!/bin/sh\n#SBATCH": "a job script: tests/slurm/test_slurm.py runs those of howto-hpc.md, and such as the others",
    "#!/bin/sh\n#flux": "a job script of Flux, which was not run",
    "sbcast ": "a job script: tests/slurm runs such",
    "root# ": "tests/mounts/test_users_page.py runs them, as root",
    "dpkg ": "tests/project/test_debian_package.py",
    "scripts/install-helper": "tests/mounts/test_helper.py",
    "scripts/soak": "tests/soak/test_soak.py runs it for less long",
    "scripts/setup": "scripts/test runs it",
    "WARNING: data.example is out": "lines of a log: tests/mounts/test_outages.py has such",
}


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int  # of its first line in the page, from 1
    language: str
    text: str
    section: str  # the heading ("##") above it, or ""

    @property
    def transcript(self) -> bool:
        """True for a block of commands and their output."""
        return self.text.startswith("$ ")

    @property
    def name(self) -> str:
        """The name of the page and the first line of the block."""
        return f"{self.page.name}: {self.text.partition(chr(10))[0].strip()}"


def blocks(page: Path, section: str = "") -> list[Block]:
    """Return the fenced blocks of a page, or of one section ("##"); the indentation of blocks in lists is removed."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", text, re.DOTALL | re.MULTILINE):
        inner = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        above = ["", *re.findall(r"^## (.*)", text[: match.start()], re.MULTILINE)][-1]
        found.append(Block(page, text.count("\n", 0, match.start()) + 2, match[2], inner, above))
    return [block for block in found if not section or block.section == section]


def pages() -> list[Path]:
    """Return the README and every page of the documentation."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def transcript(page: Path, section: str = "") -> list[tuple[str, str]]:
    """Return (command, output) of all transcripts in a page, or in one section of it, in order."""
    return [pair for block in blocks(page, section) if block.transcript for pair in commands(block.text)]


class Line(NamedTuple):
    """A command in a block that is not a transcript."""

    page: str
    number: int  # in the page, from 1
    text: str  # the shell command, in one line

    @property
    def name(self) -> str:
        """The page and the line number of the command."""
        return f"{self.page}:{self.number}"


def examples(block: Block) -> bool:
    """Return True for a block with the examples at the end of a command's help."""
    return block.text.startswith("Examples:\n")


def lines() -> list[Line]:
    """Return the commands of all blocks except transcripts and the blocks of SHOWN.

    In examples these are the indented lines, without the remarks behind them; in other blocks all lines.
    """
    found: list[Line] = []
    for block in (block for page in pages() for block in blocks(page)):
        shown = block.text.startswith((">>> ", *SHOWN))
        if block.transcript or block.language in DATA or shown or usage(block):
            continue
        goes_on = False
        for number, line in enumerate(block.text.splitlines(), block.line):
            if examples(block) and not line.startswith("  "):
                continue
            text = re.sub(r" {3,}.*", "", line.strip()) if examples(block) else line.strip()
            if goes_on:
                found[-1] = found[-1]._replace(text=f"{found[-1].text} {text}")
            else:
                found.append(Line(block.page.name, number, text))
            goes_on = text.endswith(("\\", "&&", "|"))
            found[-1] = found[-1]._replace(text=found[-1].text.removesuffix("\\").rstrip())
    return found


def usage(block: Block) -> bool:
    """Return True for a block with the usage line of a command, as scripts/write-docs writes it."""
    return re.fullmatch(r"zarrfs [a-z -]*(\[OPTIONS\]|COMMAND).*\n", block.text) is not None


def commands(text: str) -> list[tuple[str, str]]:
    """Return (command, output) of one block. A command continues after \\, && or |, and in a here document."""
    found: list[tuple[str, str]] = []
    until = ""  # the line with which a command ends
    goes_on = False
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


def check_transcript(
    directory: Path, page: Path, *, names: Mapping[str, str] | None = None, masks: Sequence[str] = (),
    env: Mapping[str, str] | None = None, cwd: Path | None = None, least: int = 1, section: str = "",
) -> None:  # fmt: skip
    """Run the transcripts of a page, or of one section, in `directory` instead of /data; compare the output.

    `names` maps other names in the page (of a server, of another directory) to those of this run. `masks` are regular
    expressions, besides MASKS, for parts of the output that differ from run to run. One shell runs all commands.
    Afterwards everything mounted below `directory` is unmounted. The page must have at least `least` commands.
    """
    expected = transcript(page, section)
    assert len(expected) >= least
    names = {"/data": str(directory), **(names or {})}
    done = run_script([command for command, _output in expected], cwd or directory, names, env)
    unmount_all(directory)
    outputs = masked(as_written(done, names), masks).split(f"{MARK}\n")
    for (command, text), found in zip(expected, outputs, strict=False):
        wanted = masked(text, masks)
        if not matches(wanted, found):
            changes = difflib.ndiff(wanted.splitlines(), found.splitlines())
            raise AssertionError(f"{page.name}: $ {command}" + "\n".join(changes))
    assert len(outputs) == len(expected) + 1, f"{page.name}: the shell ended at {expected[len(outputs) - 1][0]}"


# A daemon's thread writes its log: wait for the logs of all mounts below the directory in which the shell started
WRITTEN = """
begun=$PWD
written() {
    LC_ALL=C.UTF-8 findmnt -ln -o TARGET -t fuse.zarrfs | grep -F "$begun/" | while read -r mnt; do
        for _ in $(seq 600); do
            getfattr --only-values -n user.zarrfs.stats "$mnt" | grep -q '"lost": [0-9]*, "waiting": [1-9]' || break
            sleep 0.1
        done
    done 2>/dev/null
}
"""


def run_script(
    lines: Sequence[str], cwd: Path, names: Mapping[str, str], env: Mapping[str, str] | None = None
) -> str:  # fmt: skip
    """Run `lines` (each with its newline) in a shell; return the output, with MARK after that of each line."""
    script = f"exec 2>&1\n{WRITTEN}"
    for line in lines:
        late = "written\n" if re.search(r"\blog\b", line) else ""
        script += f"{late}{as_here(line, names)}echo '{MARK}'\n"
    path = ":".join((os.path.dirname(PROGRAM), os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin:/sbin"))
    variables = os.environ | forkserver.variables(path) | {"LC_ALL": "C", "TZ": "UTC"} | dict(env or {})
    return subprocess.run(
        ["bash", "-c", script], cwd=cwd, env=variables, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        timeout=500, check=False,
    ).stdout  # fmt: skip


def as_here(text: str, names: Mapping[str, str]) -> str:
    """Replace the names of the page in `text` with those of this run; a name ends where a word ends."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w-])", lambda _match, name=name: names[name], text)
    return text


def as_written(text: str, names: Mapping[str, str]) -> str:
    """Replace the names of this run in an output with the names of the page."""
    for name, here in sorted(names.items(), key=lambda pair: len(pair[1]), reverse=True):
        text = text.replace(here, name)
    return text


def masked(text: str, masks: Sequence[str] = ()) -> str:
    """Replace the parts of `text` that differ from run to run with a star."""
    for mask in (*masks, *MASKS):
        text = re.sub(mask, "*", text)
    return text


def matches(wanted: str, found: str) -> bool:
    """Return whether an output matches the wanted one, in which a line "..." matches any lines."""
    pattern = "".join("(?:.*\n)*" if line == "...\n" else re.escape(line) for line in wanted.splitlines(keepends=True))
    return re.fullmatch(pattern, found) is not None


def unmount_all(directory: Path) -> None:
    """Unmount all mounts below `directory`, the last one first: by `zarrfs umount`, else lazily."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4].replace("\\040", " ") for line in file]
    for point in reversed(points):
        if point.startswith(f"{directory}/"):
            done = subprocess.run([PROGRAM, "umount", point], capture_output=True, timeout=60, check=False)
            if done.returncode:
                subprocess.run(["umount", "-l", point], capture_output=True, check=False)
