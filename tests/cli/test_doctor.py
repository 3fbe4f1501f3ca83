"""zarrfs doctor, without mounts: what it says of directories of indexes, and of names that are not text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zarrfs.cli.doctor.findings import OK, PROBLEM, Finding, shown
from zarrfs.cli.doctor.places import indexes
from zarrfs.config.options import Options


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_a_directory_of_indexes_is_good_where_a_mount_takes_it(tmp_path: Path) -> None:
    def found(mode: int, owner: int) -> Finding:
        tmp_path.chmod(mode)
        os.chown(tmp_path, owner, -1)
        return next(iter(indexes(Options(index_dir=str(tmp_path)))))

    assert found(0o700, 0).state == found(0o1777, 0).state == OK
    assert found(0o777, 0).state == PROBLEM
    finding = found(0o700, 1234)
    assert (finding.state, finding.fact) == (PROBLEM, f"{tmp_path} belongs to user 1234, who could replace its files")


def test_a_name_is_one_line() -> None:
    finding = Finding("indexes", OK, "/a\n\x1b[2J/b\udce9")
    assert shown(finding) == "ok       indexes:        /a\\n\\x1b[2J/b\\xe9"
