"""zarrfs doctor without a mount: its findings on index directories and sources, and how it prints odd paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.servers import Faulty
from tests.servers import faulty as faulty
from zarrfs.cli.doctor.findings import OK, PROBLEM, Finding, format_finding
from zarrfs.cli.doctor.places import indexes
from zarrfs.cli.doctor.sources import open_and_read
from zarrfs.config.options import Options


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_an_index_directory_is_ok_only_if_no_other_user_can_replace_its_files(tmp_path: Path) -> None:
    def found(mode: int, owner: int) -> Finding:
        tmp_path.chmod(mode)
        os.chown(tmp_path, owner, -1)
        return next(iter(indexes(Options(index_dir=str(tmp_path)))))

    assert found(0o700, 0).state == found(0o1777, 0).state == OK
    assert found(0o777, 0).state == PROBLEM
    finding = found(0o700, 1234)
    assert (finding.state, finding.fact) == (PROBLEM, f"{tmp_path} belongs to user 1234, who could replace its files")


@pytest.mark.parametrize(
    ("path", "state", "says"),
    [
        ("/\xe9.json?a=\xe9", 404, "HTTP status 404"), ("/\udce9.json", 404, "HTTP status 404"),
        ("/\xe9.json", 200, "not JSON"), (":99999/a.json", 0, "not a URL: no such port or host"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_opened_is_a_problem_with_its_reason(
    path: str, state: int, says: str, faulty: Faulty
) -> None:
    base = faulty.url.rpartition(":")[0] if path[0] == ":" else faulty.url
    if state == 200:
        faulty.put("/%C3%A9.json", b"junk")
    [*_server, source] = open_and_read(base + path)(Options(cache="none"))
    assert (source.state, says in source.fact) == (PROBLEM, True), source.fact
    assert base in source.fact


def test_control_characters_in_a_path_are_escaped() -> None:
    finding = Finding("indexes", OK, "/a\n\x1b[2J/b\udce9")
    assert format_finding(finding) == "ok       indexes:        /a\\n\\x1b[2J/b\\xe9"
