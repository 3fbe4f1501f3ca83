"""Every example of docs/commands.md, which are those of `zarrfs COMMAND --help`, is run and ends with status 0."""

from __future__ import annotations

import pytest

from tests.mounts.doclines import Ended, check, here
from tests.mounts.doclines import ended as ended
from tests.pages import Line

pytestmark = pytest.mark.timeout(600)  # the first test waits for the world, with all its servers


@pytest.mark.parametrize("line", [line for line in here() if line.page == "commands.md"], ids=lambda line: line.name)
def test_an_example(line: Line, ended: Ended) -> None:
    check(line, ended)
