"""The wheel and the sdist: they are complete, and the installed wheel works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build in a copy of this checkout; return the output directory."""
    clone = tmp_path_factory.mktemp("clone") / "clone"
    for top in ("zarrfs", "scripts", "systemd", "docs", ".ci", "tests/project"):
        if (ROOT / top).exists():
            shutil.copytree(ROOT / top, clone / top, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1760000000"}  # as if it were the time of the commit
    subprocess.run([clone / "scripts/build", clone / "out"], env=environment, check=True, stdout=subprocess.DEVNULL)
    return clone / "out"


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.glob(pattern)
    return found


def test_the_wheel_has_the_program_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = wheel.namelist()
        metadata = message_from_bytes(wheel.read(next(name for name in names if name.endswith("/METADATA"))))
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "zarrfs").rglob("*.py")} | {"zarrfs/py.typed"}
    wanted |= {f"share/man/man{page.suffix[1:]}/{page.name}" for page in (ROOT / "docs/man").iterdir()}
    assert {re.sub(r"^zarrfs-[^/]+\.data/data/", "", name) for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert metadata["License-Expression"] == "MIT"
    assert {"s3", "netcdf"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_sdist_has_the_files_that_packagers_need(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"docs/man/zarrfs.1", "systemd/zarrfs@.service", "scripts/test", "CHANGELOG.md", "LICENSE"} <= names


@pytest.mark.nightly
def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, symlinks=True)
    site = place / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "-q", "--python", place / "bin/python", "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, only(built, "*.whl")], check=True, timeout=100)
    # use the dependencies of the tests' environment, but not its zarrfs: this directory comes later in sys.path
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")

    def run(*arguments: object) -> str:
        command = [place / "bin/zarrfs", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path).stdout

    where = [place / "bin/python", "-c", "import zarrfs; print(zarrfs.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert found.startswith(str(place))
    assert run("--version").startswith("zarrfs ")
    known = "import fsspec; print(fsspec.get_filesystem_class('zarrfs'))"
    python = [place / "bin/python", "-c", known]
    kind = subprocess.run(python, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "zarrfs.python.filesystem.ZarrfsFileSystem" in kind.stdout
    command = [place / "bin/mount.zarrfs", "-f", "refs.json"]
    helper = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (helper.returncode, helper.stderr[:20]) == (1, "mount.zarrfs: usage:")
    assert (place / "share/man/man1/zarrfs.1").exists()
    (tmp_path / "refs.json").write_text('{"version": 1, "refs": {"a/b": "hello"}}')
    (tmp_path / "mnt").mkdir()
    run("mount", "refs.json", "mnt")
    try:
        assert (tmp_path / "mnt/a/b").read_text() == "hello"
    finally:
        run("umount", "mnt")
    remove = [*pip, "-q", "--python", place / "bin/python", "uninstall", "-y", "zarrfs"]
    subprocess.run(remove, check=True, timeout=100)
    assert not (place / "bin/zarrfs").exists()
    assert not list(site.glob("zarrfs*"))


def test_links_of_the_documentation_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = {page: re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages}
    heads = {page: re.findall(r"(?m)^#+ (.*)", text[page]) for page in pages}
    anchors = {page: {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in heads[page]} for page in pages}
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", text[page]):
            name, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors[target], f"{page}: {link}"
