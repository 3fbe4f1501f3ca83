"""Every message explained in docs/troubleshooting.md is provoked here and compared with the program's output."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DATA, run
from tests.machine import Machine
from tests.net.test_tls import Server
from tests.net.test_tls import authority as authority
from tests.net.test_tls import server as server
from tests.pages import DOCS, run_script, unmount_all
from tests.servers import Faulty, free_port
from tests.servers import faulty as faulty

MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
# Shell functions of the scripts: "m" mounts with a log; "killed" kills the daemon and waits until reads fail;
# "log" prints the log; "ro" mounts, reads a file and prints the log
BEGIN = """
m() { zarrfs mount -o log_file=log,retries=0 "$@"; }
killed() { kill -9 $(cat pid); while ls mnt >/dev/null 2>&1; do sleep 0.01; done; }
log() {  # when all of it is written
    for _ in $(seq 500); do
        getfattr --only-values -n user.zarrfs.stats mnt | grep -q '"lost": 0, "waiting": 0}' && break
        sleep 0.01
    done
    cat log
}
ro() { m "$1" mnt; cat "mnt/$2" >mnt.out; log; }
"""
ARRAY = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<i4", "compressor": None, "filters": None,
         "fill_value": 0, "order": "C"}  # fmt: skip
# Each message of the page and the script that provokes it. The script runs in a directory with refs.json (a text, and
# two ranges of data.bin), http.json (keys named after the server's responses), stores, and an empty directory mnt;
# $URL is the server's URL
SCRIPTS = {
    "…: not a directory": "zarrfs mount refs.json data.bin",
    "…: already a mount point (…, type fuse.zarrfs)": "m refs.json mnt; m refs.json mnt",
    "…: lies inside the source …: the mount would contain itself": "mkdir zlib/a; zarrfs mount zlib zlib/a",
    "…: not mounted": "zarrfs umount mnt",
    "…: cannot unmount: in use by pid …": "m refs.json mnt; exec 9<mnt/a; zarrfs umount mnt; exec 9<&-",
    "Transport endpoint is not connected": "m -o pid_file=pid refs.json mnt; killed; cat mnt/a",
    "…: its daemon has died": "m -o pid_file=pid refs.json mnt; killed; zarrfs stats mnt",
    "unknown option '…' (did you mean …?)": "zarrfs mount -o cachedir=/tmp refs.json mnt",
    "option … needs a value: …": "zarrfs mount -o cache_dir refs.json mnt",
    "option …: expected a size with a unit, such as 64MiB": "zarrfs mount -o cache_size=10 refs.json mnt",
    "…: not TOML: …": "echo 'cache_dir =' >wrong.toml; zarrfs mount --config wrong.toml refs.json mnt",
    "option log_file=…: no such file or directory": "zarrfs mount -o log_file=nowhere/log refs.json mnt",
    "metrics=…: the port is in use: each mount has its own": "zarrfs mount -o metrics=${URL#http://} refs.json mnt",
    "….json: no such file or directory": "zarrfs mount none.json mnt",
    "HTTP status 404 Not Found": "ro http.json none",
    "HTTP status 403 Forbidden": "ro http.json forbidden",
    "Connection refused": "m http://127.0.0.1:$UNUSED/refs.json mnt",
    "[Errno -…] …": "ro http.json unknown",
    "its certificate is refused: …": "ro tls.json a",
    "$SSL_CERT_FILE: …: no such file or directory": "export SSL_CERT_FILE=/nope; ro tls.json a",
    "… needs the package …: …": "zarrfs mount $PACKAGE://a/b mnt",
    "the protocol '…' is unknown": "zarrfs mount nosuch://a/b mnt",
    "…: neither a reference set nor a file archive; see -o type=": "zarrfs mount neither.json mnt",
    "…: not JSON: …": "head -c 40 refs.json >b.json; zarrfs mount b.json mnt",
    "…: offset: negative: left out": "m negative.json mnt",
    "…: in template …: …": "zarrfs mount -o strict template.json mnt",
    "gen: expands to … entries, more than … (-o gen_limit=)": "zarrfs mount -o gen_limit=10 gen.json mnt",
    "…: no such file or directory [EIO]": "rm data.bin; ro refs.json x/0",
    "…: has changed since it was first read [EIO]": (
        "m refs.json mnt; cat mnt/x/0; printf %30s other >data.bin; cat mnt/x/1; log"
    ),
    "…: has … bytes, bytes […) were asked for [EIO]": "truncate -s 5 data.bin; ro refs.json x/0",
    "not read within … (-o read_timeout=) [EIO]": "m -o read_timeout=500ms http.json mnt; cat mnt/slow; log",
    "HTTP status 500 Internal Server Error (… attempts) [EIO]":
        "m -o retries=1 http.json mnt\ncat mnt/broken; log",
    "… files need blobs; none given: -o blobs=DIR": "m archive.json mnt",
    "no such blob: in none of … [EIO]": "m -o blobs=empty archive.json mnt; cat mnt/job/inputs/table.csv; log",
    "its bytes have another hash than its name says [EIO]": (
        "for blob in blobs/*; do printf Z | dd of=$blob conv=notrunc status=none; done\n"
        "m -o blobs=blobs archive.json mnt; cat mnt/job/inputs/table.csv >mnt.out; log"
    ),
    "a set from the network reaches no local file (-o allow=file, or allow_path=DIR)": "ro $URL/local.json a",
    "a set from the network reaches only public addresses, and … is none (-o allow=private)": "ro $URL/private.json a",
    "…: local targets are refused, as root mounts for others: give allow_path=": "m -o allow_other refs.json mnt",
    "damaged: …": "zarrfs check zlib",
    "numcodecs has no such codec here": "zarrfs check nosuch",
    "left out of view=v3: …": "m -o view=v3 objects mnt; ls mnt; log",
    "…: is a symbolic link to …: leads to …, which is out of the store (-o allow_path=DIR)":
        "ln -s ../data.bin zlib/1; ro zlib 1",
    "…: is a symbolic link to …, which is not there (git annex get fetches it)":
        "ln -s .git/annex/objects/k/k zlib/1; ro zlib 1",
    "Read-only file system": "m refs.json mnt; echo >mnt/new",
    "…: is in use by another mount (process …)":
        "m -o upperdir=empty refs.json mnt; m -o upperdir=empty refs.json zlib",
    "…: holds changes of …, not of …": (
        "m -o upperdir=empty refs.json mnt; echo >mnt/new; zarrfs umount mnt; m -o upperdir=empty http.json mnt"
    ),
    "…: no upper directory: no such file or directory": "zarrfs mount -o upperdir=nowhere refs.json mnt",
    "a mount with an upper directory is not refreshed: …": "m -o upperdir=empty refs.json mnt; zarrfs refresh mnt",
    "option …: cannot change while mounted: unmount, and mount again":
        "m refs.json mnt; zarrfs refresh --set view=v3 mnt",
    "…: already exists; --force replaces it": "zarrfs commit --upperdir empty -O refs.json http.json",
}  # fmt: skip
# Messages to a user of a machine: root's command before, the user's command, root's command after
FUSERMOUNT = shutil.which("fusermount3") or "/usr/bin/fusermount3"
BIN = os.path.dirname(FUSERMOUNT)
AS_USER = {
    "there is no /dev/fuse …": (
        "mkdir /run/dev && mount --bind /run/dev /dev",
        "zarrfs mount refs.json mnt",
        "umount /dev",
    ),
    "fusermount3 is not installed (Debian: apt install fuse3)": (
        f"mkdir -p /mnt/up /mnt/up-work && mknod /mnt/up/{os.path.basename(FUSERMOUNT)} c 0 0 && mount -t overlay "
        f"-o lowerdir={BIN},upperdir=/mnt/up,workdir=/mnt/up-work none {BIN}",
        "zarrfs mount refs.json mnt",
        f"umount -l {BIN}",
    ),
    'option allow_other: /etc/fuse.conf has no line "user_allow_other" (root can add it)': (
        "true",
        "zarrfs mount -o allow_other refs.json mnt",
        "true",
    ),
    "…: not writable: a user mounts only where he may write": ("true", "zarrfs mount refs.json /usr/share", "true"),
    "too many mounts of FUSE (…): mount_max is …, root can raise it in /etc/fuse.conf": (
        "echo mount_max = 0 >/etc/fuse.conf",
        "zarrfs mount refs.json mnt",
        "echo >/etc/fuse.conf",
    ),
}


def says(message: str, text: str) -> bool:
    """Return whether a line of `text` matches the message, "…" being any characters."""
    return re.search(".+".join(map(re.escape, message.split("…"))), text) is not None


def missing_package() -> str:
    """Return a protocol whose package is not installed here, or an empty string."""
    from importlib.util import find_spec

    for protocol, package in (("abfs", "adlfs"), ("gs", "gcsfs"), ("s3", "s3fs"), ("sftp", "sshfs")):
        if find_spec(package) is None:
            return protocol
    return ""


def test_every_message_is_provoked() -> None:
    assert len(MESSAGES) > 25
    assert sorted(MESSAGES) == sorted([*SCRIPTS, *AS_USER])


@pytest.fixture
def place(tmp_path: Path, faulty: Faulty) -> Iterator[Path]:
    """Return the directory in which the scripts run, with its files."""
    faulty.put("/forbidden", bytes(10), forever=403)
    faulty.put("/broken", bytes(10), forever=500)
    faulty.put("/slow", bytes(10), forever="slow")
    url = {name: f"{faulty.url}/{name}" for name in ("forbidden", "none", "broken", "slow")}
    url["unknown"] = "http://no-such-host.invalid/x"
    sets = {
        "refs": {"a": "text", "x/0": ["data.bin", 0, 10], "x/1": ["data.bin", 10, 10]},
        "http": {name: [target, 0, 10] for name, target in url.items()},
        "template": {"a": ["{{u}}"]},
        "gen": {},
        "negative": {"a": ["x", -1, 5], "b": "text"},
    }
    more = {
        "template": {"templates": {"u": "{{ ().__class__ }}"}},
        "gen": {"gen": [{"key": "a{{i}}", "url": "x", "dimensions": {"i": {"stop": 1000}}}]},
    }
    for name, refs in sets.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": 1, "refs": refs, **more.get(name, {})}))
    for name, target in (("local", "/etc/hostname"), ("private", "http://10.0.0.1/x")):
        faulty.put(f"/{name}.json", json.dumps({"version": 1, "refs": {"a": [target, 0, 5]}}).encode())
    (tmp_path / "neither.json").write_text('{"a": 1}')
    (tmp_path / "data.bin").write_bytes(bytes(range(65, 91)))
    stores: dict[str, dict[str, object]] = {
        "zlib": {"compressor": {"id": "zlib", "level": 1}},
        "nosuch": {"compressor": {"id": "nosuch"}},
        "objects": {"dtype": "|O", "fill_value": None},
    }
    for name, changed in stores.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".zarray").write_text(json.dumps(ARRAY | changed))
        (tmp_path / name / "0").write_text("rubbish")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mnt").mkdir()
    shutil.copy(DATA / "archives/flux-list.json", tmp_path / "archive.json")
    shutil.copytree(DATA / "archives/blobs", tmp_path / "blobs")
    yield tmp_path
    faulty.release()
    unmount_all(tmp_path)
    subprocess.run(["umount", "-l", tmp_path / "mnt"], stderr=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize("message", SCRIPTS)
def test_the_message_is_printed(message: str, place: Path, faulty: Faulty, server: Server) -> None:
    if "tls.json" in SCRIPTS[message]:
        refs = {"a": [f"{server()}/x", 0, 10]}
        (place / "tls.json").write_text(json.dumps({"version": 1, "refs": refs}))
    environment = {"URL": faulty.url, "UNUSED": str(free_port()), "PACKAGE": missing_package()}
    if "$PACKAGE" in SCRIPTS[message] and not environment["PACKAGE"]:
        pytest.skip("all packages are installed here")
    said = output(SCRIPTS[message], place, environment)
    assert says(message, said), said


def output(script: str, place: Path, environment: dict[str, str]) -> str:
    """Run a script and return its output. A single command is run without a shell, which is faster."""
    if re.fullmatch("(m|zarrfs) [^;&|$>\n]+", script) is None:
        return run_script([f"{BEGIN}{script}\n"], place, {}, environment)
    first, *words = shlex.split(script)
    done = run(*(["mount", "-o", "log_file=log,retries=0"] if first == "m" else []), *words, cwd=place)
    return done.stdout + done.stderr


@pytest.mark.parametrize("message", AS_USER)
def test_the_message_to_a_user_is_printed(message: str, machine: Machine) -> None:
    before, script, after = AS_USER[message]
    machine.root(before)
    try:
        done = machine.run(*script.split(), user="ann")
    finally:
        machine.root(after)
    assert done.returncode == 1 + ("option" in message)
    assert says(message, done.stderr), done.stderr


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Start a machine with a user "ann" whose home directory contains refs.json and mnt."""
    with Machine() as made:
        made.user("ann")
        refs = json.dumps({"version": 1, "refs": {"a": "text"}})
        made.path("/home/ann/refs.json").write_text(refs)
        made.root("mkdir /home/ann/mnt && chown -R ann: /home/ann && chmod 644 /home/ann/refs.json")
        yield made
