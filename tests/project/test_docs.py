"""The documents agree with the program."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """scripts/write-docs as a module."""
    loader = importlib.machinery.SourceFileLoader("write_docs", str(ROOT / "scripts/write-docs"))
    spec = importlib.util.spec_from_loader("write_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_pages_of_options_are_up_to_date(writer: ModuleType) -> None:
    assert writer.PAGE.read_text() == writer.page(writer.PAGE.read_text()), "run scripts/write-docs"
    assert writer.STATS_PAGE.read_text() == writer.stats_page(writer.STATS_PAGE.read_text()), "run scripts/write-docs"
    assert writer.COMMANDS_PAGE.read_text() == writer.commands_page(), "run scripts/write-docs"
    for name in writer.PAGES:
        assert (writer.MAN / name).read_text() == writer.manual(name), "run scripts/write-docs"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_man_page_names_every_command(writer: ModuleType) -> None:
    from zarrfs.cli import COMMANDS

    assert list(dict.fromkeys(text.split()[0] for text in writer.COMMANDS)) == list(COMMANDS)  # some have two forms


@pytest.mark.parametrize("name", ["zarrfs-archive.1", "zarrfs-stage.1"])
def test_man_pages_of_groups_name_every_command_and_option(writer: ModuleType, name: str) -> None:
    from zarrfs.cli import main
    from zarrfs.cli.archive import archive

    group: click.Group = archive if name == "zarrfs-archive.1" else main
    names = group.list_commands(click.Context(group)) if group is archive else ["stage", "unstage", "stage-out", "run"]
    text = (writer.MAN / name).read_text().replace("\\-", "-")
    for one in names:
        command = group.get_command(click.Context(group), one)
        assert command is not None
        assert f"\n.SS {one} " in text
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                longest = max(parameter.opts, key=len).removeprefix("--")
                shared = longest == "option" or longest.replace("-", "_") in writer.TABLE
                assert shared or f"--{longest}" in text, f"{one}: {longest}"


def test_man_page_of_refs_names_every_command_and_option(writer: ModuleType) -> None:
    from zarrfs.cli.refs import COMMANDS, refs

    by_name = {text.split()[0]: text for text in writer.REFS}
    assert sorted(by_name) == sorted(COMMANDS)
    shared = {f"--{name.replace('_', '-')}" for name in writer.TABLE}
    shared |= {"--option", "--help-all", "--verbose", "--quiet", "--debug"}
    for name, text in by_name.items():
        command = refs.get_command(click.Context(refs), name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not shared & set(parameter.opts):
                assert any(option in text for option in parameter.opts), f"{name}: {parameter.opts}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/man").iterdir()), ids=lambda page: page.name)
def test_man_pages_are_formatted_without_a_warning(page: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here")
    command = ["groff", "-man", "-Tascii", "-ww", "-z", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
