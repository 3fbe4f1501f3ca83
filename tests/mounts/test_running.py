"""Running mounts: changed options, idle timeout, final report, signals, pid files and notify pipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import PROGRAM, run
from tests.mounts.mounting import alive, counters_of, daemon_pid, log_of, mount_lines, mounted, until
from tests.mounts.refreshing import write_set
from tests.servers import Faulty, faulty
from zarrfs.config.options import parse

__all__ = ["faulty"]
HELPER = [sys.executable, "-m", "zarrfs.cli.mount_helper"]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    write_set(tmp_path / "set.json", {"a": b"content"})
    return tmp_path / "set.json"


def remount(root: Path, options: str) -> subprocess.CompletedProcess[str]:
    """Run the mount helper as `mount -o remount` does."""
    return subprocess.run(
        [*HELPER, "set.json", str(root), "-o", options], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.promise("S38")
def test_limits_can_be_changed_while_mounted(faulty: Faulty, tmp_path: Path) -> None:
    """The memory cache gets a lower limit and evicts the blocks above it."""
    url, document = faulty.put("/data", os.urandom(1 << 20)), tmp_path / "set.json"
    document.write_text(json.dumps({"version": 1, "refs": {
        f"f{index}": [url, index << 16, 1 << 16] for index in range(16)}}))  # fmt: skip
    with mounted(document, tmp_path / "mnt", "allow=private", "retries=1") as root:
        for index in range(16):
            (root / f"f{index}").read_bytes()
        assert counters_of(root)["remote"]["cache"]["kept"] >= 1 << 20
        done = run("refresh", "--json", "--set", "memory_limit=256KiB,retries=0", root)
        assert json.loads(done.stdout)["changed"] == {"memory_limit": 256 << 10, "retries": 0}
        cache = counters_of(root)["remote"]["cache"]
        assert (cache["limit"], cache["kept"] <= 256 << 10) == (256 << 10, True)
        assert run("refresh", "--set", "retries=0", root).stdout == f"{root}: nothing to change\n"


@pytest.mark.promise("S38")
def test_prefetch_can_be_switched_on_and_off(faulty: Faulty, tmp_path: Path) -> None:
    refs = {f"x/{index}": [faulty.put(f"/{index}", b"value")] for index in range(120)}
    (tmp_path / "set.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with mounted(tmp_path / "set.json", tmp_path / "mnt", "allow=private", "prefetch=0B") as root:

        def started(first: int) -> int:
            """Read 40 values in order; return the number of keys prefetched so far."""
            for index in range(first, first + 40):
                assert (root / f"x/{index}").read_bytes() == b"value"
            return int(counters_of(root)["read_ahead"]["started"])

        assert started(0) == 0
        assert run("refresh", "--set", "prefetch=1MiB", root).returncode == 0
        assert started(40) > 0
        assert run("refresh", "--set", "prefetch=0B", root).returncode == 0
        ahead = int(counters_of(root)["read_ahead"]["started"])
        assert started(80) == ahead


@pytest.mark.promise("S38")
def test_remount_changes_all_or_nothing(document: Path, tmp_path: Path) -> None:
    fstab = f"ro,cache_size=1GiB,fmask=022,fsname={document},nofail,_netdev,x-systemd.automount,nosuid,allow=file"
    with mounted(document, tmp_path / "mnt", "cache_size=1GiB,fmask=022,allow=file") as root:
        assert remount(root, f"remount,{fstab},cache_size=2GiB,log_level=debug").returncode == 0
        assert "cache_size=2147483648, log_level=debug" in log_of(root)
        for wrong in ("umask=077", "view=v3", "allow=all", "s3.anon=true", "fmask=0", "upperdir=/tmp"):
            done = remount(root, f"remount,{fstab},cache_size=5GiB,{wrong}")
            assert done.returncode == 1
            assert f"option {wrong.partition('=')[0]}" in done.stderr
            assert done.stderr.count("\n") == 1
        assert "changed" not in log_of(root).partition("log_level=debug")[2]
        done = run("refresh", "--set", "cache_size=5GiB,umask=077", root)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert remount(root, f"remount,ro,{'x-' + 'y' * 900},retries=7").returncode == 0
        assert "retries=7" in log_of(root)


@pytest.mark.promise("S39")
def test_an_idle_mount_is_unmounted(document: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    log = tmp_path / "log"
    options = f"log_file={log},log_level=debug,attr_timeout=0,entry_timeout=0"
    assert run("mount", document, mountpoint, "-o", options).returncode == 0
    pid = daemon_pid(mountpoint)
    with open(mountpoint / "a", "rb") as file:  # open, but not read
        assert run("refresh", "--set", "idle_timeout=1500ms", mountpoint).returncode == 0
        time.sleep(2.5)
        assert file.read() == b"content"
        holder = subprocess.Popen(["sleep", "60"], cwd=mountpoint)  # keeps the mount in use without a request
    looked = [time.monotonic()]

    def in_vain() -> bool:
        looked.append(time.monotonic())
        return "idle for " in log.read_text()

    try:
        until(in_vain)  # an attempt to unmount has just failed, and the next one is some time away
        os.stat(mountpoint / "a")
        assert mount_lines(mountpoint)
    finally:
        holder.kill()
        holder.wait()
    began = last = time.monotonic()
    longest = began - looked[-2]
    while last < began + 2.5:  # the mount is in use
        with contextlib.suppress(FileNotFoundError):
            os.stat(mountpoint / "a")
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        time.sleep(0.1)
    # unless the machine was so busy that the mount was idle between two stat()
    assert mount_lines(mountpoint) or longest > 0.7
    until(lambda: not mount_lines(mountpoint))
    until(lambda: not alive(pid))
    assert "unmounted, idle for " in log.read_text()


def test_statistics_do_not_reset_the_idle_timeout(document: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    assert run("mount", document, mountpoint, "-o", "idle_timeout=1s").returncode == 0
    deadline = time.monotonic() + 60
    while mount_lines(mountpoint):
        assert time.monotonic() < deadline
        try:
            os.getxattr(mountpoint, "user.zarrfs.stats")
            os.statvfs(mountpoint)
        except OSError:
            assert not mount_lines(mountpoint)
        time.sleep(0.1)


@pytest.mark.promise("S39")
@pytest.mark.parametrize("how", ["umount", "zarrfs", "term"])
def test_the_daemon_logs_a_report_when_it_ends(how: str, faulty: Faulty, tmp_path: Path) -> None:
    url, document, mountpoint = faulty.put("/data", b"x" * 5000), tmp_path / "set.json", tmp_path / "mnt"
    document.write_text(json.dumps({"version": 1, "refs": {"a": [url, 0, 5000], "b": [faulty.url + "/none", 0, 5]}}))
    mountpoint.mkdir()
    log = tmp_path / "log"
    assert run("mount", document, mountpoint, "-o", f"log_file={log},allow=private").returncode == 0
    pid = daemon_pid(mountpoint)
    (mountpoint / "a").read_bytes()
    with pytest.raises(OSError, match="Input/output error"):
        (mountpoint / "b").read_bytes()
    if how == "term":
        os.kill(pid, signal.SIGTERM)
    else:
        subprocess.run(["umount", mountpoint] if how == "umount" else [PROGRAM, "umount", mountpoint], check=True)
    until(lambda: not alive(pid))
    [line] = [line for line in log.read_text().splitlines() if "unmounted after" in line]
    assert re.search(r"mnt: unmounted after [\d.]+ s: 4\.9 KiB served in 1 reads, .* % of \d+ blocks", line)
    assert re.search(r"[1-9]\d* requests \(\d+ repeated, [1-9]\d* failed\), [1-9]\d* errors", line)


@pytest.mark.promise("S39")
def test_the_report_counts_unsynced_files(document: Path, tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    with mounted(document, tmp_path / "mnt", f"upperdir={tmp_path / 'upper'}") as root:
        for name in ("one", "two", "three"):
            (root / name).write_bytes(b"new")
        with open(root / "one", "ab") as file:
            file.write(b"more")
            file.flush()
            os.fsync(file.fileno())
    assert "2 files written and not synced" in log_of(tmp_path / "mnt")


def test_usr1_logs_where_tasks_wait(faulty: Faulty, tmp_path: Path) -> None:
    url, document = faulty.put("/data", b"x" * 5000, "slow"), tmp_path / "set.json"
    document.write_text(json.dumps({"version": 1, "refs": {"a": [url, 0, 5000]}}))
    with mounted(document, tmp_path / "mnt", "allow=private") as root:
        reader = threading.Thread(target=(root / "a").read_bytes)
        reader.start()
        assert faulty.arrived.wait(60)
        os.kill(daemon_pid(root), signal.SIGUSR1)
        until(lambda: log_of(root).count("tasks:") > 5)
        faulty.release()
        reader.join()
        lines = [line for line in log_of(root).splitlines() if "tasks:" in line]
        assert any("cache/" in line or "net/" in line for line in lines), lines
        assert any("_signals" in line for line in lines)
        assert len(lines) < 60
        assert "statistics: {" in log_of(root)
        assert re.search(r"memory: [1-9]\d* MiB", log_of(root))


def test_an_idle_timeout_of_zero_never_unmounts(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    with mounted(document, tmp_path / "mnt", "idle_timeout=0") as root:
        time.sleep(1)
        assert (root / "a").read_text() == "x"


def test_sigterm_does_not_unmount_another_mount_on_top(tmp_path: Path) -> None:
    document = tmp_path / "set.json"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    with mounted(document, tmp_path / "mnt") as root:
        daemon = daemon_pid(root)
        subprocess.run(["mount", "-t", "tmpfs", "other", root], check=True)
        try:
            (root / "precious").write_text("of somebody else")
            os.kill(daemon, signal.SIGTERM)
            until(lambda: "something else is mounted over it (other, tmpfs)" in log_of(root))
            assert (root / "precious").read_text() == "of somebody else"
        finally:
            subprocess.run(["umount", root], check=True)
        assert (root / "a").read_text() == "x"


def test_the_daemon_of_a_writable_mount_writes_its_files_with_mode_644(document: Path, tmp_path: Path) -> None:
    """The daemon has umask 0, because the kernel applies the umask of the process that creates a file in the mount."""
    (tmp_path / "upper").mkdir()
    names = {"pid_file": "pid", "metrics": "metrics"}
    options = ",".join(f"{option}={tmp_path / name}" for option, name in names.items())
    with mounted(document, tmp_path / "mnt", f"upperdir={tmp_path / 'upper'},{options}"):
        for name in names.values():
            until((tmp_path / name).exists)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644, name


def test_the_notify_pipe_does_not_need_a_pid_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from zarrfs.daemon import serve

    read, write = os.pipe()
    called: list[bool] = []
    options = parse([f"pid_file={tmp_path}/none/pid", f"notify_pipe={write}"]).options
    with open(read, "rb") as pipe:
        serve._announce(options, lambda: called.append(True))
        assert (pipe.read(), called) == (b"\n", [True])
    assert f"pid_file={tmp_path}/none/pid: cannot be written: no such file or directory" in caplog.text


@pytest.mark.parametrize("more", [[], ["--foreground"]])
def test_the_notify_pipe_may_be_standard_output(more: list[str], tmp_path: Path) -> None:
    document, mnt = tmp_path / "set.json", tmp_path / "mnt"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    mnt.mkdir()
    command = [PROGRAM, "mount", *more, document, mnt, "-o", "notify_pipe=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"\n", "and its end"
        assert (mnt / "a").read_bytes() == b"x"
        assert run("umount", mnt).returncode == 0
        assert process.wait(60) == 0


def test_a_notify_pipe_without_a_reader_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    from zarrfs.daemon import serve

    read, write = os.pipe()
    os.close(read)
    serve._announce(parse([f"notify_pipe={write}"]).options, lambda: None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)
    assert f"notify_pipe={write}: cannot be written to: broken pipe" in caplog.text


def test_a_file_that_is_no_pid_file_is_not_replaced(tmp_path: Path) -> None:
    document, mine = tmp_path / "set.json", tmp_path / "mine"
    document.write_text('{"version": 1, "refs": {"a": "x"}}')
    mine.write_text("my thesis")
    (tmp_path / "mnt").mkdir()
    done = run("mount", document, tmp_path / "mnt", "-o", f"pid_file={mine}")
    assert done.returncode == 2
    assert "is not a pid file" in done.stderr
    assert mine.read_text() == "my thesis"
