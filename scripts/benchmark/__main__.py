"""Run the measures and print one table: scripts/bench --help."""

from __future__ import annotations

import argparse
import compileall
import contextlib
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import archives
import arrays
import blosc_frames
import clients
import flux_archives
import many
import measures
import netcdf
import nodes
import remote
import sets
import stores
import workers
import writes
from data import Data
from measures import Result
from remote_data import Tree

import zarrfs

SUITES: dict[str, dict[str, Any]] = {
    "basics": measures.MEASURES,
    "references": sets.MEASURES,
    "remote": remote.MEASURES,
    "clients": clients.MEASURES,
    "writes": writes.MEASURES,
    "archives": archives.MEASURES,
    "many": many.MEASURES,
    "stores": stores.MEASURES,
    "arrays": arrays.MEASURES,
    "netcdf": netcdf.MEASURES,
    "nodes": nodes.MEASURES,
    "blosc": blosc_frames.MEASURES,
    "flux": flux_archives.MEASURES,
    "workers": workers.MEASURES,
}
NOTES = {
    "remote": remote.NOTES, "clients": clients.NOTES, "writes": writes.NOTES, "archives": archives.NOTES,
    "many": many.NOTES, "stores": stores.NOTES, "arrays": arrays.NOTES, "netcdf": netcdf.NOTES,
    "blosc": blosc_frames.NOTES, "flux": flux_archives.NOTES, "workers": workers.NOTES, "nodes": nodes.NOTES,
}  # fmt: skip

HEADER = f"{'what':52} {'zarrfs':>26}   {'against':36} {'':>26} {'ratio':>7}  limit"


def samples_text(samples: list[float]) -> str:
    """Format samples as "median [min .. max]"."""
    if not samples:
        return "-"
    low, middle, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        for value in (min(samples), statistics.median(samples), max(samples))
    )
    return f"{middle} [{low} .. {high}]"


def row(result: Result) -> str:
    """Format a result as a line of the table."""
    what = f"{result.what} ({result.unit})" if result.unit else result.what
    ratio = f"{result.figure:.2f}" if result.theirs and result.ours else ""
    limit = ""
    if result.limit is not None:
        limit = f"{'<=' if result.at_most else '>='} {result.limit:g} {'MISSED' if result.missed else 'ok'}"
    against = f"{result.against}{', ' + result.note if result.note else ''}"
    theirs = samples_text(result.theirs) if result.theirs else ""
    ours = samples_text(result.ours)
    return f"{what:52} {ours:>26}   {against:36} {theirs:>26} {ratio:>7}  {limit}".rstrip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure zarrfs beside its peers.")
    parser.add_argument("suite", nargs="?", default="basics", choices=SUITES, help="what is measured (default basics)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a limit is missed")
    parser.add_argument("--peers", action="store_true", help="remote: rclone and fsspec.fuse, too")
    parser.add_argument("--only", metavar="NAMES", help="some of the suite")
    parser.add_argument("--directory", metavar="DIR", help="where files are made (default: one in the system's)")
    for flag, usual, metavar, meaning in (
        ("--rounds", 3, "N", "samples of each"),
        ("--entries", None, "N", "references (default 100,000; references, many: a million); files (10,000)"),
        ("--size", None, "MIB", "size of the large file (default 512; writes, archives: 1024; arrays, netcdf: 2048)"),
        ("--large", 10_000_000, "N", "references: those of the larger set (default 10 million)"),
        ("--parquet", 100_000_000, "N", "references: those of the Parquet set (default 100 million)"),
    ):
        parser.add_argument(flag, type=int, default=usual, metavar=metavar, help=meaning)
    chosen = parser.parse_args()
    available = SUITES[chosen.suite]
    chosen.names = chosen.only.split(",") if chosen.only else list(available)
    unknown = [name for name in chosen.names if name not in available]
    if unknown:
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(available)}")
    return chosen


def make(chosen: argparse.Namespace, directory: Path, cleanup: contextlib.ExitStack) -> Any:
    """Make the data that the measures of a suite take as their argument."""
    if chosen.suite == "basics":
        return Data(directory, chosen.entries or 100_000, (chosen.size or 512) << 20)
    if chosen.suite == "references":
        return sets.Sets(directory, chosen.entries or 1_000_000, chosen.large, chosen.parquet)
    if chosen.suite == "writes":
        return writes.Writes(directory, (chosen.size or 1024) << 20, chosen.entries or 10_000)
    if chosen.suite == "archives":
        return archives.Archives(directory, chosen.entries or 10_000, (chosen.size or 1024) << 20)
    if chosen.suite == "flux":
        return flux_archives.Instances(directory, chosen.entries or 2000)
    if chosen.suite in ("arrays", "netcdf"):
        return arrays.Arrays(directory, (chosen.size or 2048) << 20)
    if chosen.suite == "blosc":
        return None
    size = (chosen.size or 512) << 20
    if chosen.suite == "stores":
        tree: Tree = stores.Stores(directory, 1 << 20)
    elif chosen.suite == "nodes":
        tree = many.Many(directory, 1 << 20, 0)
    elif chosen.suite == "many":
        tree = many.Many(directory, size, chosen.entries or 1_000_000)
    else:
        tree = Tree(directory, size)
    tree.peers = chosen.peers
    cleanup.callback(tree.stop)
    tree.start()
    return tree


def measure(chosen: argparse.Namespace, data: Any) -> int:
    """Print the table; return the number of missed limits. A measure that fails counts as one."""
    missed = 0
    for name in chosen.names:
        try:
            for result in SUITES[chosen.suite][name](data, chosen.rounds):
                print(row(result), flush=True)
                missed += result.missed
        except Exception as exc:
            print(f"{name}: failed: {exc!r}", flush=True)
            missed += 1
    return missed


def main() -> int:
    chosen = arguments()
    if chosen.suite == "flux" and shutil.which("flux") is None:
        print("bench: flux: skipped: no flux on PATH")
        return 0
    # an installed program is compiled; with PYTHONDONTWRITEBYTECODE, the modules of a checkout would never be
    compileall.compile_dir(Path(zarrfs.__file__).parent, quiet=1)
    with contextlib.ExitStack() as cleanup:
        directory = tempfile.TemporaryDirectory(prefix="zarrfs-bench-", dir=chosen.directory)
        data = make(chosen, Path(cleanup.enter_context(directory)), cleanup)
        notes = NOTES.get(chosen.suite, "")
        print(f"{chosen.rounds} rounds, interleaved; median [min .. max]\n{notes}\n{HEADER}", flush=True)
        missed = measure(chosen, data)
    if missed:
        print(f"\nbench: {missed} limit{'s' if missed > 1 else ''} missed", file=sys.stderr)
    return 1 if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
