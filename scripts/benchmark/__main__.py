"""Run the measures and print one table: scripts/bench --help."""

from __future__ import annotations

import argparse
import compileall
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import measures
import remote
from data import Data
from measures import Result
from remote_data import Tree

import zarrfs

SUITES: dict[str, dict[str, Any]] = {
    "basics": measures.MEASURES,
    "remote": remote.MEASURES,
}
NOTES = {"remote": remote.NOTES}

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
    theirs = samples_text(result.theirs) if result.theirs else ""
    ours = samples_text(result.ours)
    return f"{what:52} {ours:>26}   {result.against:36} {theirs:>26} {ratio:>7}  {limit}".rstrip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure zarrfs beside its peers.")
    parser.add_argument("suite", nargs="?", default="basics", choices=SUITES, help="what is measured (default basics)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a limit is missed")
    parser.add_argument("--only", metavar="NAMES", help="some of the suite")
    parser.add_argument("--directory", metavar="DIR", help="where files are made (default: one in the system's)")
    for flag, usual, metavar, meaning in (
        ("--rounds", 3, "N", "samples of each"),
        ("--entries", 100_000, "N", "references"),
        ("--size", 512, "MIB", "size of the large file"),
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
        return Data(directory, chosen.entries, chosen.size << 20)
    tree = Tree(directory, chosen.size << 20)
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
