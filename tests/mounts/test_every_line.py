"""Every command of the documentation that is not part of a transcript is run, and exits with status 0.

The commands in commands.md are the examples of `zarrfs COMMAND --help`.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.mounts.doclines import NOT_HERE, Ended, check, here
from tests.mounts.doclines import ended as ended
from tests.pages import ROOT, Line, lines

pytestmark = pytest.mark.timeout(600)  # the first test waits until the DocWorld and its servers run


@pytest.mark.parametrize("line", here(), ids=lambda line: line.name)
def test_a_line_exits_with_status_0(line: Line, ended: Ended) -> None:
    check(line, ended)


def test_every_exception_is_still_in_the_pages() -> None:
    assert [begin for begin in NOT_HERE if not any(line.text.startswith(begin) for line in lines())] == []


def test_the_demo_of_the_readme_runs() -> None:
    done = subprocess.run([ROOT / "scripts/demo"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("demo: done\n")
