"""The part of flux_archives.py that runs within a Flux instance: DIRECTORY ZARRFS BROKERS ROUNDS WORK...

It archives DIRECTORY/tree and prints {work: [seconds of each round]} as JSON. The works take turns; each runs on all
ranks at the same time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKS = {  # scripts that run in an empty directory; $z is zarrfs
    "extract": "exec flux archive extract --name=bench -C .",
    "mount": """
        mkdir mnt index
        $z mount flux:bench mnt -o index_dir=$PWD/index
        cat mnt/small/* mnt/large | wc -c >read
        $z umount mnt
    """,
    "stage": "ZARRFS_STATE_DIR=$PWD/state XDG_CACHE_HOME=$PWD/cache exec $z stage --copy flux:bench out",
}


def on_all(script: str) -> None:
    """Run a script on all ranks."""
    subprocess.run(["flux", "exec", "-r", "all", "sh", "-euc", script], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    directory, zarrfs, brokers, rounds, *works = sys.argv[1:]
    tree = os.path.join(directory, "tree")
    subprocess.run(["flux", "archive", "create", "--name=bench", "-C", tree, "."], check=True)
    seconds: dict[str, list[float]] = {work: [] for work in works}
    for _ in range(int(rounds)):
        for work in works:
            made = tempfile.mkdtemp(prefix="out-", dir=directory)
            for rank in range(int(brokers)):
                os.mkdir(f"{made}/{rank}")
            on_all("flux content dropcache")
            began = time.perf_counter()
            on_all(f"z={zarrfs}; cd {made}/$(flux getattr rank); {WORKS[work]}")
            seconds[work].append(time.perf_counter() - began)
            check(Path(made), work, Path(tree))
    print(json.dumps(seconds))


def check(made: Path, work: str, tree: Path) -> None:
    """Check the result of a work on each rank, and truncate its files: removing them would slow down later ones."""
    for rank in made.iterdir():
        if work == "mount":
            expected = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
            assert int((rank / "read").read_text()) == expected
        else:
            out = rank / "out" if work == "stage" else rank
            subprocess.run(["diff", "-r", tree, out], check=True, stdout=sys.stderr)
        for path in rank.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)


if __name__ == "__main__":
    main()
