"""Run the measures and print one table: scripts/bench --help."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from data import Data
from measures import MEASURES, Result

HEADER = f"{'what':44} {'zarrfs':>26}   {'against':36} {'':>26} {'ratio':>7}  limit"


def samples_text(samples: list[float]) -> str:
    """median [min .. max]"""
    if not samples:
        return "-"
    low, middle, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        for value in (min(samples), statistics.median(samples), max(samples))
    )
    return f"{middle} [{low} .. {high}]"


def row(result: Result) -> str:
    """One line of the table."""
    what = f"{result.what} ({result.unit})" if result.unit else result.what
    ratio = f"{result.figure:.2f}" if result.theirs else ""
    limit = ""
    if result.limit is not None:
        limit = f"{'<=' if result.at_most else '>='} {result.limit:g} {'MISSED' if result.missed else 'ok'}"
    against = f"{result.against}{', ' + result.note if result.note else ''}"
    theirs = samples_text(result.theirs) if result.theirs else ""
    ours = samples_text(result.ours)
    return f"{what:44} {ours:>26}   {against:36} {theirs:>26} {ratio:>7}  {limit}".rstrip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure zarrfs beside its peers.")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a limit is missed")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(MEASURES)}")
    for flag, usual, metavar, meaning in (
        ("--rounds", 3, "N", "samples of each"),
        ("--entries", 100_000, "N", "references of the large set"),
        ("--size", 512, "MIB", "size of the large file"),
    ):
        about = f"{meaning} (default {usual})"
        parser.add_argument(flag, type=int, default=usual, metavar=metavar, help=about)
    chosen = parser.parse_args()
    chosen.names = chosen.only.split(",") if chosen.only else list(MEASURES)
    unknown = [name for name in chosen.names if name not in MEASURES]
    if unknown:
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return chosen


def main() -> int:
    chosen = arguments()
    missed = 0
    with tempfile.TemporaryDirectory(prefix="zarrfs-bench-") as directory:
        data = Data(Path(directory), chosen.entries, chosen.size << 20)
        print(f"{chosen.rounds} rounds, interleaved; median [min .. max]\n\n{HEADER}", flush=True)
        for name in chosen.names:
            for result in MEASURES[name](data, chosen.rounds):
                print(row(result), flush=True)
                missed += result.missed
    if missed:
        print(f"\nbench: {missed} limit{'s' if missed > 1 else ''} missed", file=sys.stderr)
    return 1 if missed and chosen.check else 0


if __name__ == "__main__":
    sys.exit(main())
