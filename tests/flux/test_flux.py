"""With a real Flux: zarrfs reads archives of Flux, Flux reads archives of zarrfs, and an instance mounts on its nodes.

Scripts run in an instance of one broker, or of four on this machine (flux start), which most tests share. They have
the directory `tree`, its archive `sample`, and zarrfs on PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROGRAM

pytestmark = pytest.mark.skipif(shutil.which("flux") is None, reason="no flux")


class Instances:
    """Running instances. `top` is the XDG_RUNTIME_DIR of their brokers and shells."""

    def __init__(self, top: Path, stack: contextlib.ExitStack) -> None:
        self.top, self._stack = top, stack
        self._uris: dict[int, str] = {}

    def uri(self, brokers: int) -> str:
        """Return the FLUX_URI of the first broker of an instance of so many brokers; start it on first use."""
        if brokers not in self._uris:
            process = self._stack.enter_context(
                subprocess.Popen(
                    ["flux", "start", "-s", str(brokers), "sh", "-c", "echo $FLUX_URI; cat"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env=os.environ | {"XDG_RUNTIME_DIR": str(self.top)},
                )
            )  # fmt: skip
            assert process.stdout is not None
            self._uris[brokers] = process.stdout.readline().strip()
        return self._uris[brokers]


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    """Yield the instances of this module, which end when their standard input is closed."""
    with contextlib.ExitStack() as stack:
        yield Instances(tmp_path_factory.mktemp("run"), stack)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create files for all encodings: inline text and bytes, blobs of several regions, a hole, a link."""
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


def in_flux(instances: Instances, tree: Path, script: str, brokers: int = 1, **variables: str) -> str:
    """Run a script in the instance of so many brokers; every command must succeed. Return its output."""
    environment = os.environ | variables | {"PATH": f"{os.path.dirname(PROGRAM)}:{os.environ['PATH']}"}
    create = "set -eu\nflux archive create --overwrite --name=sample -C tree .\n"
    done = subprocess.run(
        ["sh", "-c", create + script], cwd=tree.parent, env=environment | {"FLUX_URI": instances.uri(brokers)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("brokers", [1, 4])
def test_an_archive_of_flux_is_mounted(instances: Instances, tree: Path, brokers: int) -> None:
    """Also on a broker other than the one that holds its blobs."""
    script = f"""
        mkdir mnt
        export FLUX_URI=$(echo "$FLUX_URI" | sed s/local-0/local-{brokers - 1}/)
        [ "$(flux getattr rank)" = {brokers - 1} ]
        flux content dropcache
        zarrfs mount flux:sample mnt
        diff -r --no-dereference tree mnt
        stat -c '%n %a %Y' tree/* | cut -d/ -f2 >expected
        stat -c '%n %a %Y' mnt/* | cut -d/ -f2 >found
        zarrfs umount mnt
        diff expected found
    """
    in_flux(instances, tree, script, brokers)


def test_zarrfs_extracts_an_archive_as_flux_does(instances: Instances, tree: Path) -> None:
    script = """
        mkdir theirs
        flux archive extract --name=sample -C theirs
        zarrfs copy flux:sample ours
        diff -r --no-dereference theirs ours
        diff -r --no-dereference tree ours
    """
    in_flux(instances, tree, script)


@pytest.mark.parametrize("inline", [False, True])
def test_flux_extracts_an_archive_of_zarrfs(instances: Instances, tree: Path, inline: bool) -> None:
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
    in_flux(instances, tree, script)


def test_files_of_a_jobspec_are_read_and_mounted(instances: Instances, tree: Path) -> None:
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
    assert in_flux(instances, tree, script, LC_ALL="C.UTF-8") == "some text\n"


@pytest.mark.parametrize("brokers", [1, 4])
def test_an_instance_mounts_on_all_its_nodes(instances: Instances, tree: Path, brokers: int) -> None:
    """As docs/clusters.md says; here the brokers share one machine, so each rank has a directory of its own."""
    script = """
        flux exec -r all sh -c 'm=m/$(flux getattr rank); mkdir -p $m && zarrfs mount -o hold flux:sample $m'
        flux run -N$(flux getattr size) -n$(flux getattr size) sh -c 'diff -r --no-dereference tree m/$FLUX_TASK_RANK'
        flux exec -r all sh -c 'zarrfs umount --below m/$(flux getattr rank)'
        ! grep "$PWD" /proc/self/mountinfo
        chmod 755 m/*
    """
    in_flux(instances, tree, script, brokers)
