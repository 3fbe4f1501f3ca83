"""docs/users.md and docs/doctor.md: each command, of a user or of root, prints the output shown below it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA
from tests.machine import Machine
from tests.pages import DOCS, MARK, Block, as_written, blocks, commands, masked

MASKS = (  # parts that differ between machines
    r"(?<=versions: ) .*", r"(?<=Linux )\S+", r"(?<=fusermount3 )[\d.]+", r"(?<=open files: )\S+",
    r"(?<=locked memory: ).*", r"\b[\d.]+ [KMGT]?i?B\b", r"(?<=container: ) .*", r"(?<=packages: ) .*",
    r"(?<=user )\d+", r"(?<=/run/user/)\d+", r"(?<=no-such-host.invalid: )[a-z ]+:",
    r"(?<=ln -s )\S+",
)  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Start a machine with the user ann and with /srv/data, which the pages call /data."""
    with Machine() as made:
        made.user("ann")
        made.root("mount -t tmpfs -o mode=755 none /srv && mkdir /srv/mnt")
        shutil.copytree(DATA / "archives", made.path("/srv/data"))
        yield made


def ran(machine: Machine, user: str, lines: list[str]) -> list[str]:
    """Run the commands in one shell of `user`; return the output of each."""
    script = "exec 2>&1\n" + "".join(f"{line.replace('/data', '/srv/data')}echo '{MARK}'\n" for line in lines)
    path = f"{Path(machine.command('zarrfs')[-1]).parent}:/usr/bin:/bin"
    done = machine.run("bash", "-c", script, user=user, PATH=path, TZ="UTC")
    return as_written(done.stdout, {"/data": "/srv/data"}).split(f"{MARK}\n")


def _user(block: Block) -> str:
    return "root" if block.language == "root" else "ann"


@pytest.mark.parametrize("page", ["users.md", "doctor.md"])
def test_the_transcripts(page: str, machine: Machine) -> None:
    wanted: list[tuple[str, str]] = []
    found: list[tuple[str, str]] = []
    for user in ("ann", "root"):
        theirs = [block for block in blocks(DOCS / page) if block.transcript and _user(block) == user]
        said = [pair for block in theirs for pair in commands(block.text)]
        wanted += [(command, masked(output, MASKS)) for command, output in said]
        outputs = ran(machine, user, [command for command, _output in said])
        found += [(command, masked(output, MASKS)) for (command, _), output in zip(said, outputs, strict=False)]
    assert len(wanted) > 4
    assert found == wanted
    assert not machine.mounts()


def test_the_commands_of_root_on_the_page_work(machine: Machine) -> None:
    """The commands after the prompt `root#` in docs/users.md."""
    texts = [block.text for block in blocks(DOCS / "users.md")]
    lines = [text.removeprefix("root# ") for text in texts if text.startswith("root# ")]
    assert len(lines) == 2
    assert ran(machine, "root", lines)[:2] == ["", ""]
    try:
        assert "user_allow_other" in machine.root("tail -n 1 /etc/fuse.conf")
        assert machine.run("stat", "-c", "%u:%g %a", "/srv/mnt", user="ann").stdout == "1000:1001 550\n"
    finally:
        machine.root("umount /srv/mnt")
