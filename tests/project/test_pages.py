"""Every block of the documentation is run by a test, or has a reason why it is not.

Tests of pages run transcripts ("$ ") and compare their output. tests/mounts/test_every_line.py runs all other
commands. Blocks that no test runs have a reason in tests/pages.py.
"""

from __future__ import annotations

import pytest

from tests.pages import DATA, ROOT, SHOWN, Block, blocks, lines, pages, usage

# Tests that run transcripts: the pages of each, or the sections ("PAGE#HEADING")
RUN = {
    "tests/mounts/test_arrays_page.py": ["array-views.md"],
    "tests/mounts/test_configuration_page.py": ["configuration.md"],
    "tests/mounts/test_fstab.py": ["fstab.md", "systemd.md"],
    "tests/mounts/test_howto_pages.py": ["howto-hpc.md", "howto-performance.md", "howto-servers.md"],
    "tests/mounts/test_icechunk.py": ["icechunk.md"],
    "tests/mounts/test_install_page.py": ["install.md"],
    "tests/mounts/test_logs_page.py": ["monitoring.md#Logs", "monitoring.md#Prometheus"],
    "tests/mounts/test_netcdf_page.py": ["netcdf.md"],
    "tests/mounts/test_readme.py": ["README.md"],
    "tests/mounts/test_running_page.py": ["running-changes.md"],
    "tests/mounts/test_stage_page.py": ["stage-in.md"],
    "tests/mounts/test_stats_page.py": ["monitoring.md#Statistics"],
    "tests/mounts/test_tutorial.py": ["tutorial.md"],
    "tests/mounts/test_users_page.py": ["users.md", "doctor.md"],
    "tests/mounts/test_views_page.py": ["zarr-views.md"],
    "tests/mounts/test_writes_page.py": ["writes.md"],
    "tests/project/test_extending.py": ["extending.md"],
    "tests/slurm/test_slurm.py": ["schedulers.md"],
    "tests/mounts/test_info_page.py": ["info-and-check.md"],
}  # fmt: skip
# Tests that run the Python sessions (">>> ") of a page
PYTHON = {"python.md": "tests/python/test_python_page.py"}
# Commands that another file runs: that file, and the words in it that show this
ELSEWHERE = {
    "scripts/install-helper": ("tests/mounts/test_helper.py", "install-helper"),
    "scripts/setup": ("scripts/test", "scripts/setup"),
    "dpkg -i": ("tests/project/test_debian_package.py", "-i /tmp/zarrfs.deb"),
    "dpkg -r": ("tests/project/test_debian_package.py", "dpkg -r"),
    "scripts/build-deb": ("tests/project/test_debian_package.py", "build-deb"),
    "scripts/soak": ("tests/soak/test_soak.py", "soak"),
    "root# ": ("tests/mounts/test_users_page.py", "root# "),
}
def all_blocks() -> list[Block]:
    """Return every block of every page."""
    return [block for page in pages() for block in blocks(page)]


@pytest.mark.parametrize("block", [b for b in all_blocks() if b.transcript], ids=lambda b: f"{b.page.name}-{b.line}")
def test_one_test_names_the_page_of_a_transcript(block: Block) -> None:
    name = block.page.name
    [test] = [file for file, named in RUN.items() if {name, f"{name}#{block.section}"} & set(named)]
    assert name in (ROOT / test).read_text()


def test_every_other_block_is_run_or_has_a_reason() -> None:
    others = [b for b in all_blocks() if not b.transcript]
    ran = {line.name for line in lines()}
    left = [b for b in others if b.language not in DATA and not usage(b) and not b.text.startswith(tuple(SHOWN))]
    for block in left:
        if block.text.startswith(">>> "):
            assert block.page.name in (ROOT / PYTHON[block.page.name]).read_text(), block.name
            continue
        numbers = range(block.line, block.line + block.text.count("\n"))
        assert any(f"{block.page.name}:{number}" in ran for number in numbers), block.name
    assert [begin for begin in SHOWN if not any(b.text.startswith(begin) for b in others)] == []


@pytest.mark.parametrize("words", ELSEWHERE)
def test_commands_excepted_here_are_in_the_named_file(words: str) -> None:
    file, seen = ELSEWHERE[words]
    assert seen in (ROOT / file).read_text()
