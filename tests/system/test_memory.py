"""The default of memory_limit=, by the memory of the machine and its cgroups, and the process' heap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zarrfs.system.memory import suggested

MIB, GIB = 1 << 20, 1 << 30
V1_UNLIMITED = 9223372036854771712  # the kernel's value for no limit in cgroups of version 1


def machine(root: Path, cgroup: str, **limits: object) -> str:
    """Make a directory like "/" with /proc/self/cgroup and the files of cgroups; in names, "__" means "/"."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_bytes(os.fsencode(cgroup))
    for name, text in limits.items():
        *parts, last = name.split("__")
        directory = root.joinpath("sys/fs/cgroup", *parts)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / last.replace("memory_", "memory.")).write_text(f"{text}\n")
    return str(root)


@pytest.mark.parametrize(
    ("memory", "limit"), [(64 * GIB, GIB), (4 * GIB, GIB), (2 * GIB, 512 * MIB), (100 * MIB, 64 * MIB)]
)
def test_without_cgroups_it_is_a_quarter_of_memory_within_bounds(memory: int, limit: int, tmp_path: Path) -> None:
    assert suggested(memory, str(tmp_path)) == limit


V1 = "12:cpuset:/x\n4:{}:/slurm/job_7\n1:name=systemd:/slurm\n0::/x\n"
V1_LIMITS = {
    "memory__slurm__job_7__memory_limit_in_bytes": V1_UNLIMITED, "memory__slurm__memory_limit_in_bytes": GIB,
    "memory__memory_limit_in_bytes": V1_UNLIMITED,
}  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "cgroup", "limits", "limit"),
    [
        (64 * GIB, "0::/jobs/one\n", {"jobs__one__memory_max": 800 * MIB}, 200 * MIB),
        (64 * GIB, "0::/jobs\n", {"jobs__memory_max": 2 * GIB, "jobs__memory_high": GIB}, 256 * MIB),
        # the limit of a parent
        (64 * GIB, "0::/a/b/c\n", {"a__b__c__memory_max": "max", "a__b__memory_max": 3 * GIB, "a__memory_max": GIB},
         256 * MIB),
        # a limit above the memory of the machine
        (2 * GIB, "0::/a\n", {"a__memory_max": 64 * GIB}, 512 * MIB),
        # containers: the root is their cgroup; with version 1, the path is that of the host
        (64 * GIB, "0::/\n", {"memory_max": GIB}, 256 * MIB),
        (64 * GIB, "4:memory:/docker/0123\n", {"memory__memory_limit_in_bytes": GIB}, 256 * MIB),
        (64 * GIB, V1.format("cpu,memory"), V1_LIMITS, 256 * MIB),
        (64 * GIB, "0::/\udcff\n", {"memory_max": GIB}, 256 * MIB),  # not UTF-8
    ],
)  # fmt: skip
def test_the_limit_is_a_quarter_of_the_lowest_limit_of_a_cgroup(
    memory: int, cgroup: str, limits: dict[str, object], limit: int, tmp_path: Path
) -> None:
    assert suggested(memory, machine(tmp_path, cgroup, **limits)) == limit


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::\n", "0::/../../a\n", "4:memory\n", "0::/a:b\n"])
def test_unreadable_limits_are_ignored(text: str, tmp_path: Path) -> None:
    root = machine(tmp_path, text, a__memory_max="a lot", memory__memory_limit_in_bytes="")
    assert suggested(2 * GIB, root) == 512 * MIB


_THREADS = """
import threading
from zarrfs.system.memory import tune_heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

tune_heap()
before, end, turn = resident(), threading.Event(), threading.Lock()
ended = threading.Semaphore(0)

def work():
    with turn:
        data = bytearray(8 << 20)
        data[::4096] = bytes(2048)
        del data
    ended.release()
    end.wait()

threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for _ in threads:
    ended.acquire()
print(resident() - before)
end.set()
"""


def test_idle_threads_hold_no_free_memory() -> None:
    """Sixteen threads read blocks from disk. If each had a malloc arena, no limit would count its free memory."""
    found = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 64 << 20

