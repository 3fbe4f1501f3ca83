"""The number of usable processors: the affinity mask, and the quotas of cgroups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.system.cpus import usable

V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 2),
        ("0::/job\n", {"sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 10**6),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "50000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1),
        ("4:cpu,cpuacct:/job\n", {f"{V1}/job/cpu.cfs_quota_us": "9\n", f"{V1}/job/cpu.cfs_period_us": "9\n"}, 1),
        ("4:cpu:/\n", {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "9\n"}, 10**6),
    ],
)
def test_a_cgroup_quota_limits_the_processors(groups: str, files: dict[str, str], limit: int, tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable(str(tmp_path)) == min(limit, len(os.sched_getaffinity(0)))


def test_without_cgroups_the_affinity_mask_decides(tmp_path: Path) -> None:
    assert usable(str(tmp_path)) == len(os.sched_getaffinity(0))
