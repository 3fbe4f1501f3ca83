"""The code that prepares and runs the commands of the documentation, including those that run until Ctrl-C.

The commands themselves are in the pages only (tests.pages.lines). This module holds what kinds of commands have in
common.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.mounts.docworld import DocWorld
from tests.pages import Line, as_here, lines

Ended = dict[str, "Future[subprocess.CompletedProcess[str]]"]

# Placeholders in the pages, and the words that replace them
NAMES = {
    "SOURCE": "refs.json", "MOUNTPOINT": "mnt", "DIR": "changes", "IMAGE ...": "image true",
    "http://...": "https://storage.example.org",
}  # fmt: skip
# Lines that are not run here: how they begin, and why they are not run
NOT_HERE = {
    "flux archive create": "it takes a Flux instance: tests/flux/test_flux.py runs it where there is one",
    "scripts/build-deb": "tests/project/test_debian_package.py builds a package with --extras flux, and installs it",
}
EMPTY = "rm -r changes && mkdir changes"
RECORD = r"zarrfs mount -o record=job.reads \1 mnt && cat mnt/air/* >/dev/null && zarrfs umount mnt"
CHANGE = rf"{EMPTY} && zarrfs mount \1 mnt -o upperdir=changes && echo 1 >mnt/.zattrs && zarrfs umount mnt"
WORK = f"{EMPTY} && zarrfs stage archive.json work -o upperdir=changes && echo new >work/new"
# (pattern of a line, commands to run before it): they mount the mount point that the line uses, write the files that
# it reads, or remove the file that it will write
BEFORE = (
    (r"zarrfs (?:umount|stats|top|refresh)\b.* (/mnt/data|mnt)\b", r"zarrfs mount refs.json \1 -o cache_dir=blocks"),
    (r"getfattr .* (/mnt/data)\b", r"zarrfs mount s3://bucket/refs.json \1 && cat \1/air/0.0.0 >/dev/null"),
    (r"apptainer exec --bind (/tmp/data)", r"zarrfs mount refs.json \1"),
    # allow_other lets a mount made by root read no local files: the set has to be one with remote targets
    (r"zarrfs mount refs.json .* allow_other|docker", "cp remote.json refs.json"),
    (r"docker run -v /srv", r"zarrfs mount refs.json /srv/data -o allow_other"),
    (r"zarrfs (?=.*warm).* (\S*(?:set|refs)\.json) .*job.reads", RECORD),
    (r"zarrfs cache .*--cache-dir (\S+)", r"zarrfs cat s3://bucket/refs.json air/0.0.0 -o cache_dir=\1 >/dev/null"),
    (r"zarrfs (?:index|commit|refs|archive create) .*-O (\S+)", r"rm -rf \1"),
    (r"zarrfs refs convert \S+ ([^-]\S*)", r"rm -rf \1"),
    (r"(?:zarrfs stage|zarrfs unstage|mkdir -m 2770) .*?(/scratch/\S+|/lustre/\S+)", r"rm -rf \1"),
    (r"zarrfs unstage ([^-]\S*)", r"zarrfs stage refs.json \1"),
    (r"zarrfs unstage --for \$\$ (\S+)", r"zarrfs stage --join --for $$ refs.json \1"),
    (r"zarrfs unstage --", "zarrfs stage refs.json input"),
    (r"zarrfs stage-out work", WORK),
    (r"zarrfs check --merge", "for i in 0 1; do zarrfs check --shard $i/2 --report part-$i.json refs.json; done"),
    (r"zarrfs commit (?!refs.json)(\S+)", CHANGE),
    (r"zarrfs (?:stage|run) archive.json .*upperdir=", EMPTY),
    (r"zarrfs archive extract (?!.*--blobs).*job.json", "cp inline.json job.json"),
)  # fmt: skip
# Lines that run until Ctrl-C: pattern, and the command that must succeed before the Ctrl-C
ENDLESS = {r"zarrfs mount --foreground": "ls /mnt/data/air", r"zarrfs top (?!--once)": "test -s said"}
ASKS = r"zarrfs discard (?!.*--yes)"  # commands that ask a question, and so need a terminal


def run(world: DocWorld, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the documentation in a DocWorld."""
    text = as_here(line, NAMES)
    before = [match.expand(what) for pattern, what in BEFORE if (match := re.match(pattern, text))]
    kept = text.startswith(("zarrfs stage", "zarrfs unstage"))
    for pattern, ready in ENDLESS.items():
        if re.match(pattern, text):
            text = f"set -m\n{text} >said 2>&1 &\nready {ready}\nkill -INT -- -$!\nwait $!"
    if re.match(ASKS, text):
        text = f"echo y | script --quiet --return --command '{text}' /dev/null"
    return world.shell(text, "\n".join(before), kept=kept)


def here() -> list[Line]:
    """Return all lines that are run here."""
    return [line for line in lines() if not line.text.startswith(tuple(NOT_HERE))]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Ended]:
    """Run the lines of all selected tests of the module, three at a time; yield a dict from a line to its future."""
    ours = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec for item in ours if hasattr(item, "callspec")]
    texts = dict.fromkeys(call.params["line"].text for call in calls)
    with DocWorld() as world, ThreadPoolExecutor(3) as pool:
        yield {text: pool.submit(run, world, text) for text in texts}
        pool.shutdown(cancel_futures=True)


def check(line: Line, ended: Ended) -> None:
    """Assert that a line exited with status 0, and that its mount, if any, has files, all of them readable."""
    done = ended[line.text].result()
    assert done.returncode == 0, f"{line.name}: {line.text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    if line.text.startswith(("zarrfs mount", "mount -t")) and "--foreground" not in line.text:
        assert re.search(r"(?m)^mounted: .*, [1-9]\d* files$", done.stderr), line.text
