"""With a real Flux: its archives mounted and extracted here, ours extracted there, a job's inputs staged in its shell.

Each script runs in an instance of its own (flux start) with `tree`, its archive `sample`, and zarrfs on PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROGRAM
from tests.mounts.mounting import mount_lines
from tests.mounts.staging import eventually

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("flux") is None, reason="there is no flux on PATH")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of all encodings: inline text and bytes, blobs of several regions, a hole, a link."""
    made = tmp_path / "tree"
    (made / "directory").mkdir(parents=True)
    (made / "text").write_text("some text\n")
    (made / "bytes").write_bytes(bytes(range(256)))
    (made / "directory/large").write_bytes(os.urandom(3_000_000))
    with (made / "hole").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end" * 1000)
    (made / "link").symlink_to("directory/large")
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    return made


def in_flux(tree: Path, script: str, brokers: int = 1, **variables: str) -> str:
    """The output of a script that runs in a new instance of so many brokers; all of it has to succeed."""
    environment = os.environ | variables | {"PATH": f"{os.path.dirname(PROGRAM)}:{os.environ['PATH']}"}
    create = "set -eu\nflux archive create --name=sample -C tree .\n"
    done = subprocess.run(
        ["flux", "start", "-s", str(brokers), "sh", "-c", create + script], cwd=tree.parent, env=environment,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_archive_of_flux_is_mounted(tree: Path) -> None:
    script = """
        mkdir mnt
        zarrfs mount flux:sample mnt
        diff -r --no-dereference tree mnt
        stat -c '%n %a %Y' tree/* | cut -d/ -f2 >expected
        stat -c '%n %a %Y' mnt/* | cut -d/ -f2 >found
        zarrfs umount mnt
        diff expected found
    """
    in_flux(tree, script)


def test_extract_makes_of_an_archive_what_flux_makes_of_it(tree: Path) -> None:
    script = """
        mkdir theirs
        flux archive extract --name=sample -C theirs
        zarrfs archive extract flux:sample -C ours
        diff -r --no-dereference theirs ours
        diff -r --no-dereference tree ours
    """
    in_flux(tree, script)


@pytest.mark.parametrize("inline", [False, True])
def test_flux_extracts_an_archive_of_ours(tree: Path, inline: bool) -> None:
    (tree.parent / "blobs").mkdir()
    where = "--inline" if inline else "--blobs blobs"
    script = f"""
        zarrfs archive create -C tree -O ours.json {where} .
        for blob in blobs/*; do
            [ ! -f "$blob" ] || [ "$(flux content store <"$blob")" = "${{blob##*/}}" ]
        done
        flux kvs put --raw archive.ours=- <ours.json
        mkdir out
        flux archive extract --name=ours -C out
        diff -r --no-dereference tree out
    """
    in_flux(tree, script)


def test_flux_restores_a_tar_of_ours(tree: Path) -> None:
    script = """
        zarrfs archive create -C tree -O ours.tar --name ours .
        flux restore --quiet --key=restored ours.tar
        flux kvs copy restored.archive.ours archive.ours
        mkdir out mnt
        flux archive extract --name=ours -C out
        diff -r --no-dereference tree out
        zarrfs mount flux:ours mnt
        diff -r --no-dereference tree mnt
        zarrfs umount mnt
        flux archive create --preserve --name=theirs -C tree .
        flux dump --quiet theirs.tar
        zarrfs archive verify theirs.tar#theirs
    """
    in_flux(tree, script)


def test_files_of_a_jobspec(tree: Path) -> None:
    script = """
        job=$(flux submit --add-file=input=tree/text --add-file=tree/bytes true)
        case $job in ƒ*) ;; *) exit 9 ;; esac
        flux job wait-event "$job" clean >/dev/null
        zarrfs cat "flux:job/$job" input
        mkdir mnt
        zarrfs mount "flux:job/$job" mnt
        cmp tree/bytes mnt/bytes
        zarrfs umount mnt
    """
    assert in_flux(tree, script, LC_ALL="C.UTF-8") == "some text\n"


@pytest.mark.parametrize("brokers", [1, 3])
def test_a_job_reads_what_its_shells_have_mounted(tree: Path, brokers: int) -> None:
    """Several brokers on one machine: their shells share XDG_RUNTIME_DIR, and a job of all of them is one job."""
    scripts = tree.parent / "scripts"
    shutil.copytree(ROOT / "scripts/flux", scripts)
    (scripts / "zarrfs.conf").write_text(f"ZARRFS={PROGRAM}\nJOBS={tree.parent}/jobs\n")
    variables = {"ZARRFS_FLUX_DIR": str(scripts), "XDG_RUNTIME_DIR": str(tree.parent)}
    script = f"""
        nodes="-N{brokers} -n{2 * brokers}"
        ZARRFS_STAGE="in flux:sample" flux run $nodes -o userrc=scripts/zarrfs.lua \
            sh -c 'echo "$ZARRFS_STAGED"; cmp tree/directory/large "$ZARRFS_STAGED/in/directory/large"'
        ZARRFS_STAGE="good flux:sample
            in flux:nothing"
        export ZARRFS_STAGE
        if flux run $nodes -o userrc=scripts/zarrfs.lua echo ran 2>said; then exit 1; fi
        grep -o 'zarrfs: .*' said
    """
    lines = in_flux(tree, script, brokers, **variables).splitlines()
    places, said = lines[: 2 * brokers], lines[2 * brokers :]
    assert len(set(places)) == brokers
    interrupted = "zarrfs: stage: interrupted by a signal"  # the exception of one shell ends the others
    assert any(line.startswith("zarrfs: in: flux:nothing: ") for line in said), said
    assert all(line == interrupted or line.startswith("zarrfs: in: flux:nothing: ") for line in said), said
    top = tree.parent / f"zarrfs-flux-{os.getuid()}"
    assert not any(mount_lines(f"{place}/in") for place in places)
    assert eventually(lambda: not list(top.iterdir()))  # the mount holders of ended shells remove their directories
    with open("/proc/self/mountinfo") as file:
        assert str(tree.parent) not in file.read()
