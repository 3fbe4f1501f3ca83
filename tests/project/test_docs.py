"""The documentation agrees with the program."""

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
    """Load scripts/write-docs as a module."""
    loader = importlib.machinery.SourceFileLoader("write_docs", str(ROOT / "scripts/write-docs"))
    spec = importlib.util.spec_from_loader("write_docs", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(writer: ModuleType) -> None:
    assert writer.PAGE.read_text() == writer.page(writer.PAGE.read_text()), "run scripts/write-docs"
    assert writer.STATS_PAGE.read_text() == writer.stats_page(writer.STATS_PAGE.read_text()), "run scripts/write-docs"
    assert writer.COMMANDS_PAGE.read_text() == writer.commands_page(), "run scripts/write-docs"
    for name in writer.PAGES:
        assert (writer.MAN / name).read_text() == writer.manual(name), "run scripts/write-docs"


def test_links_lead_to_existing_files_and_headings() -> None:
    root = ROOT.resolve()
    pages = {page: without_code_blocks(page) for page in [*root.glob("*.md"), *(root / "docs").glob("*.md")]}
    for page, text in pages.items():
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            to = (page.parent / target).resolve() if target else page
            assert to.exists(), f"{page.name}: {target}"
            known = anchors(pages.get(to, "")) if anchor else {""}
            assert anchor in known, f"{page.name}: {target}#{anchor}"


def without_code_blocks(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)  # of a link, only its text
        found.append(re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-"))
    return {f"{one}-{count}" if (count := found[:at].count(one)) else one for at, one in enumerate(found)}


@pytest.mark.parametrize("name", ["zarrfs.1", "zarrfs-archive.1", "zarrfs-refs.1", "zarrfs-stage.1"])
def test_man_pages_name_every_option_of_their_commands(writer: ModuleType, name: str) -> None:
    text = (writer.MAN / name).read_text().replace("\\-", "-")
    for one, command in writer.commands_of(name):
        assert f"\n.SS {one} " in text
        section = text.partition(f"\n.SS {one} ")[2].partition("\n.S")[0]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                longest = max(parameter.opts, key=len)
                shared = longest in ("--option", *(flags.split()[-1] for flags in writer.VERBOSITY))
                shared |= longest[2:].replace("-", "_") in writer.TABLE
                assert shared or longest in section, f"{one}: {longest}"


def test_every_command_has_a_man_page(writer: ModuleType) -> None:
    from zarrfs.cli import COMMANDS

    described = {one.split()[0] for name in ("zarrfs.1", "zarrfs-stage.1") for one, _ in writer.commands_of(name)}
    assert described == set(COMMANDS) - {"archive", "refs"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs/man").iterdir()), ids=lambda page: page.name)
def test_man_pages_are_formatted_without_a_warning(page: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("there is no groff here")
    command = ["groff", "-man", "-Tascii", "-ww", "-z", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
