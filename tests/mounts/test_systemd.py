"""The units in systemd/, run by systemd itself on a machine that is booted for the tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.booted import Booted
from tests.conftest import DATA
from tests.machine import ROOT
from tests.mounts.mounting import eventually

REFS = json.dumps({"version": 1, "refs": {"a": "hello", "b": ["/srv/data/v2.zarr/.zgroup"]}})
QUICK = "[Unit]\nStartLimitIntervalSec=0\n[Service]\nRestartSec=0.3\n"  # all other settings are the unit's
OTHERS = "allow_other,allow_path=/srv/data"


def configuration(name: str, source: str = "/srv/data/refs.json", options: str = OTHERS) -> str:
    return f"SOURCE={source}\nMOUNTPOINT=/mnt/{name}\nOPTIONS={options}\n"


@pytest.fixture(scope="module")
def machine() -> Iterator[Booted]:
    """Boot a machine with our units, data in /srv/data and the user ann."""
    with Booted({"/srv/data/refs.json": REFS}) as made:
        made.root(f"{ROOT}/scripts/install-helper --units")
        shutil.copytree(DATA / "zarr/v2_hier", made.path("/srv/data/v2.zarr"))
        made.user("ann", runtime=False)
        made.root("mkdir -p /etc/zarrfs /run/systemd/system/zarrfs@.service.d")
        made.path("/run/systemd/system/zarrfs@.service.d/quick.conf").write_text(QUICK)
        made.root("systemctl daemon-reload")
        yield made


def configure(machine: Booted, name: str, **more: str) -> str:
    """Write /etc/zarrfs/NAME.conf; return the unit's name."""
    machine.path(f"/etc/zarrfs/{name}.conf").write_text(configuration(name, **more))
    return f"zarrfs@{name}"


def shown(machine: Booted, unit: str, name: str) -> str:
    """Return a property of a unit."""
    return machine.root(f"systemctl show -P {name} {unit}")


def journal(machine: Booted, unit: str) -> str:
    machine.root("journalctl --sync", check=False)
    return machine.root(f"journalctl --no-pager -o cat -u {unit}")


def test_a_service_mounts_a_data_set_for_all_users(machine: Booted) -> None:
    unit = configure(machine, "all")
    machine.root(f"systemctl start {unit}")
    assert "/mnt/all" in machine.mounts()  # as soon as start returns, and visible outside the service
    assert machine.run("cat", "/mnt/all/a", user="ann").stdout == "hello"
    assert machine.run("cat", "/mnt/all/b", user="ann").stdout == (DATA / "zarr/v2_hier/.zgroup").read_text()
    machine.path("/srv/data/refs.json").write_text(REFS.replace("hello", "changed"))
    machine.root(f"systemctl reload {unit}")
    assert eventually(lambda: machine.root("cat /mnt/all/a") == "changed")
    assert eventually(lambda: shown(machine, unit, "ActiveState") == "active")  # "reloading" for a second
    machine.path("/srv/data/refs.json").write_text(REFS)
    machine.root(f"systemctl kill -s KILL {unit}")
    assert eventually(
        lambda: machine.root(f"systemctl show -P NRestarts -P SubState {unit}").split() == ["1", "running"]
    )
    assert machine.root("cat /mnt/all/a") == "hello"
    machine.root(f"systemctl stop {unit}")
    assert shown(machine, unit, "Result") == "success"
    assert "/mnt/all" not in machine.mounts()


def test_stopping_while_a_reader_has_a_file_open(machine: Booted) -> None:
    """The reader gets an error, not an empty directory; the next start clears the dead mount."""
    unit = configure(machine, "busy")
    drop_in = machine.path("/run/systemd/system/zarrfs@busy.service.d/stop.conf")
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nTimeoutStopSec=2\n")  # the test waits for it
    machine.root(f"systemctl daemon-reload && systemctl start {unit}")
    script = "exec 3</mnt/busy/a; echo open; sleep 1; cd /mnt/busy || exec ls /mnt/busy; "
    script += "until ! ls >/dev/null 2>&1; do sleep 0.1; done; ls"
    reader = machine.start("sh", "-c", script, user="ann")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "open\n"
    machine.root(f"systemctl stop {unit}", check=False)
    said, error = reader.communicate(timeout=60)
    assert (said, "not connected" in error) == ("", True)
    assert "in use by pid" in journal(machine, unit)
    assert shown(machine, unit, "ActiveState") == "failed"
    assert machine.mounts().count("/mnt/busy") == 1
    machine.root(f"systemctl start {unit}")
    assert machine.root("cat /mnt/busy/a") == "hello"
    machine.root(f"systemctl stop {unit}")


def test_a_missing_source_is_retried_and_a_wrong_option_is_not(machine: Booted) -> None:
    """A source may appear later; an invalid option stays invalid."""
    unit = configure(machine, "wrong", options="blob=/x")
    assert machine.run("systemctl", "start", unit).returncode == 1
    assert shown(machine, unit, "ActiveState") == "failed"
    assert "did you mean blobs" in journal(machine, unit)
    unit = configure(machine, "late", source="/srv/data/late.json")
    assert machine.run("systemctl", "start", unit).returncode == 1
    assert eventually(lambda: int(shown(machine, unit, "NRestarts")) > 0)
    machine.path("/srv/data/late.json").write_text(REFS)
    assert eventually(lambda: shown(machine, unit, "SubState") == "running")
    machine.root(f"systemctl stop {unit}; systemctl reset-failed")
    unit = configure(machine, "none", source="/nonexistent")
    machine.root("rm /etc/zarrfs/none.conf")
    assert "Assertion failed" in machine.run("systemctl", "start", unit).stderr


def test_the_sandbox_of_the_service_allows_views_and_writes(machine: Booted) -> None:
    """Decoders need no new executable memory, and files that users create get their owners and mode bits."""
    view = configure(machine, "view", source="/srv/data/v2.zarr", options="view=arrays")
    written = configure(machine, "written", options=f"{OTHERS},upperdir=/srv/upper")
    machine.root(f"mkdir -m 777 /srv/upper && systemctl start {view} {written}")
    assert machine.root("find /mnt/view -type f | xargs cat | wc -c") != "0"
    script = "cd /mnt/written && mkdir dir && chmod 2770 dir && echo x >dir/file && mkfifo dir/pipe && rm a"
    done = machine.run("sh", "-c", script, user="ann")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.root("stat -c '%U %a' /srv/upper/dir /srv/upper/dir/file").split("\n") == ["ann 2770", "ann 644"]
    machine.root(f"systemctl stop {view} {written}")


def test_an_automount_line_of_fstab_is_mounted_at_first_access(machine: Booted) -> None:
    options = "ro,nofail,_netdev,allow_other,x-systemd.automount,x-systemd.idle-timeout=1s"
    machine.path("/etc/fstab").write_text(f"/srv/data/v2.zarr /mnt/looked zarrfs {options} 0 0\n")
    machine.root("systemctl daemon-reload && systemctl start mnt-looked.automount")
    assert machine.mounts("autofs").count("/mnt/looked") == 1
    assert "/mnt/looked" not in machine.mounts()
    assert machine.run("cat", "/mnt/looked/.zgroup", user="ann").stdout == (DATA / "zarr/v2_hier/.zgroup").read_text()
    look = "cat /mnt/looked/.zgroup >/dev/null; findmnt -n -o TARGET -t fuse.zarrfs"  # one command: it soon expires
    assert eventually(lambda: "/mnt/looked" in machine.root(look, check=False).split("\n"))
    assert eventually(lambda: "/mnt/looked" not in machine.mounts())
    assert machine.run("ls", "-A", "/mnt/looked", user="ann").stdout  # mounted again after it expired
    machine.root("systemctl stop mnt-looked.automount && : >/etc/fstab && systemctl daemon-reload")
    assert "/mnt/looked" not in machine.mounts()


@pytest.mark.nightly
def test_the_example_units_mount_on_access(machine: Booted) -> None:
    """The examples are a mount and an automount unit; after a kill, reads fail until the mount unit restarts."""
    for example in (ROOT / "systemd/examples").iterdir():
        text = example.read_text().replace("/data/era5/combined.json", "/srv/data/refs.json")
        machine.path(f"/etc/systemd/system/{example.name}").write_text(text.replace("/data/era5", "/srv/data"))
    machine.root("systemctl daemon-reload && systemctl enable --now mnt-era5.automount")
    assert machine.root("cat /mnt/era5/a") == "hello"
    assert shown(machine, "mnt-era5.mount", "SubState") == "mounted"
    machine.root("systemctl kill -s KILL mnt-era5.mount")
    assert eventually(lambda: "not connected" in machine.run("cat", "/mnt/era5/a").stderr)  # "abort" while it ends
    machine.root("systemctl restart mnt-era5.mount")
    assert machine.root("cat /mnt/era5/a") == "hello"
    machine.root("systemctl disable --now mnt-era5.automount && systemctl stop mnt-era5.mount")
    assert "/mnt/era5" not in machine.mounts()


@pytest.mark.nightly
def test_the_user_manager_runs_a_user_s_own_unit(machine: Booted) -> None:
    machine.root("loginctl enable-linger ann")
    directory = f"/run/user/{machine.root('id -u ann')}"
    assert eventually(machine.path(f"{directory}/systemd/private").exists)
    lines = "SOURCE=/srv/data/v2.zarr\nMOUNTPOINT=/home/ann/own\nOPTIONS=\n"
    done = machine.run("sh", "-c", f"mkdir -p .config/zarrfs && echo '{lines}' >.config/zarrfs/own.conf", user="ann")
    assert done.returncode == 0, done.stderr

    def manager(command: str) -> None:
        done = machine.run("systemctl", "--user", command, "zarrfs@own", user="ann", XDG_RUNTIME_DIR=directory)
        assert done.returncode == 0, done.stderr

    manager("start")
    assert "/home/ann/own" in machine.mounts()
    assert machine.run("cat", "/home/ann/own/.zgroup", user="ann").stdout
    manager("reload")
    manager("stop")
    assert "/home/ann/own" not in machine.mounts()


HELPER = "from zarrfs.cli.mount_helper import main\nraise SystemExit(main())\n"
CONSUMER = """\
[Unit]
Requires=zarrfs@era5.service
After=zarrfs@era5.service
RequiresMountsFor=/mnt/line /mnt/era5

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=sh -c 'cat /mnt/era5/a >/shared/at-boot'
ExecStop=sh -c 'cat /mnt/era5/a >/shared/at-shutdown; cat /mnt/line/a >>/shared/at-shutdown'
"""


@pytest.mark.nightly
def test_boot_and_shutdown(machine: Booted) -> None:
    """A unit that requires mounts can read them from start to stop; a failing line of fstab does not stop the boot."""
    units, wanted = "/etc/systemd/system", "/etc/systemd/system/multi-user.target.wants"
    service = (ROOT / "systemd/zarrfs@.service").read_text().replace("/usr/bin/zarrfs", f"{ROOT}/.venv/bin/zarrfs")
    files: dict[str, str | Path] = {
        "/srv/data/refs.json": REFS,
        "/etc/zarrfs/era5.conf": configuration("era5", options=""),
        f"{units}/zarrfs@.service": service,
        f"{wanted}/zarrfs@era5.service": Path("../zarrfs@.service"),
        f"{units}/consumer.service": CONSUMER,
        f"{wanted}/consumer.service": Path("../consumer.service"),
        "/usr/sbin/mount.zarrfs": f"#!{ROOT}/.venv/bin/python -I\n{HELPER}",
        "/etc/fstab": "/srv/data/refs.json /mnt/line zarrfs nofail 0 0\n/gone.json /mnt/gone zarrfs nofail 0 0\n",
    }
    with Booted(files, states=("degraded",)) as booted:
        assert (booted.shared / "at-boot").read_text() == "hello"
        failed = booted.root("systemctl --failed --plain --no-legend").split()
        assert failed[0] == "mnt-gone.mount"
        assert set(booted.mounts()) == {"/mnt/era5", "/mnt/line"}
        booted.root("systemctl poweroff", check=False)
        assert booted.ended()
        assert (booted.shared / "at-shutdown").read_text() == "hellohello"
