"""Archives and stage-in: `scripts/bench archives`. zarrfs beside tar, a parallel download, and Flux where it runs.

Each sample is a whole command, with the CPU time of it and its children. zarrfs exits when its output is synced to the
disk; tar exits earlier, so tar with `sync -f` is a row of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import peers
import remote_peers
from measures import Result
from remote import in_turns, result
from remote_data import HTTP, LATE, Tree

MIB, GIB, MB = 1 << 20, 1 << 30, 1e6
SMALL = 4096  # bytes of each small file
REMOTE, REMOTE_SIZE = 1000, 256 << 10  # files to stage, and bytes of each
CONNECTIONS = 32  # of the parallel download
SPARSE = 100 * GIB  # apparent size of the sparse tree, in 100 files
DATA = 64 << 10  # bytes of each stretch of data in a sparse file, one every 128 MiB
FLUX = {"create small": 2.6, "create large": 16.0, "extract small": 2.0, "extract large": 7.1}  # s, recorded

NOTES = """\
Before each sample dirty pages are written. Blobs and archives lie on the same disk as the trees. CPU is that of a
command and its children; memory is the most that these had together (PSS, every 20 ms) or one of them alone (RSS).
"""


class Used(NamedTuple):
    """The seconds of wall, user and system time that a command took."""

    wall: float
    user: float
    system: float


def timed(command: list[str | Path]) -> Used:
    """Run a command; raise RuntimeError with its error output if it fails."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{command[:3]}: {said.read().decode(errors='replace').strip()[-300:]}")
    return Used(took, usage.ru_utime, usage.ru_stime)


class Archives:
    """Trees, and archives of them, each made when it is first used."""

    def __init__(self, directory: Path, entries: int, size: int) -> None:
        self.directory, self.entries, self.size = directory, entries, size
        self.usual = (entries, size) == (10_000, GIB)  # the sizes for which FLUX was recorded
        self.index = directory / "index"
        self.index.mkdir()

    def tree(self, kind: str) -> Path:
        """Return a tree of many small files, a hundred to a directory, or of one large file."""
        root = self.directory / kind
        if not root.exists():
            root.mkdir()
            if kind == "large":
                with open(root / "file", "wb") as file:
                    for _ in range(self.size // MIB):
                        file.write(os.urandom(MIB))
            else:
                for number in range(self.entries):
                    path = root / f"d{number // 100}" / f"f{number % 100}"
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(os.urandom(SMALL))
        return root

    def tar(self, kind: str) -> Path:
        """Return the .tar archive that zarrfs makes of a tree."""
        made = self.directory / f"{kind}.zarrfs.tar"
        if not made.exists():
            timed(create_tar(self.tree(kind), made))
        return made

    def archive(self, kind: str) -> tuple[Path, Path]:
        """Return the archive of a tree: (document, directory of blobs)."""
        document, blobs = self.directory / f"{kind}.json", self.directory / f"{kind}.blobs"
        if not document.exists():
            timed(create(self.tree(kind), document, blobs))
        return document, blobs

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Path]:
        """Make an empty directory; truncate its files afterwards, and remove them only at the end of the run.

        ext4 does not reuse an inode that was removed within the last minutes: creating files then means a search for
        other inodes, which took five times as long here.
        """
        made = Path(tempfile.mkdtemp(prefix="out-", dir=self.directory))
        yield made
        for path in made.rglob("*"):
            if path.is_file() and not path.is_symlink():
                os.truncate(path, 0)


def create(tree: Path, document: Path, blobs: Path) -> list[str | Path]:
    return [peers.ZARRFS, "archive", "create", "-q", "-C", tree, "-O", document, "--blobs", blobs, "."]


def create_tar(tree: Path, made: Path) -> list[str | Path]:
    return [peers.ZARRFS, "archive", "create", "-q", "-C", tree, "-O", made, "."]


def extract_tar(made: Path, to: Path) -> list[str | Path]:
    return [peers.ZARRFS, "archive", "extract", "-q", "-C", to, made]


def extract(document: Path, blobs: Path, to: Path) -> list[str | Path]:
    return [peers.ZARRFS, "archive", "extract", "-q", "-C", to, "--blobs", blobs, document]


def flux(*arguments: str | Path) -> list[str | Path]:
    """Return a `flux archive` command; raise peers.Unavailable outside of a Flux instance."""
    if shutil.which("flux") is None or "FLUX_URI" not in os.environ:
        raise peers.Unavailable("this is not run within an instance of Flux")
    return ["flux", "archive", *arguments]


def synced(command: list[str | Path], directory: Path) -> list[str | Path]:
    """Return a command that runs `command` and then syncs the file system of `directory`."""
    return ["sh", "-c", 'directory=$1; shift; "$@" && exec sync -f "$directory"', "sh", directory, *command]


Works = dict[str, Callable[[Path], list[str | Path]]]  # name -> function from an empty directory to the command


OURS = {"zarrfs .tar": "a tar", "zarrfs": "blobs in a directory"}


def compared(
    run: Archives, rounds: int, what: str, works: Works, limit: float, recorded: float, limited: Sequence[str]
) -> Iterator[Result]:
    """Yield rows of zarrfs beside each peer: how often it does the work per second, and the CPU time that this takes.

    `limit`: the minimum ratio to plain tar, for our works in `limited`. `recorded`: seconds that Flux once took; our
    works must not take longer.
    """
    used: dict[str, list[Used]] = {name: [] for name in works}

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            with run.fresh() as directory:
                command = works[name](directory)
                os.sync()
                took = timed(command)
            used[name].append(took)
            return 1 / took.wall

        return sample

    samples = in_turns(rounds, {name: sampler(name) for name in works})
    for one, how in OURS.items():
        for name in works:
            if name not in OURS and (samples[name] or not name.startswith("flux")):
                held = limit if name == "tar" and one in limited else None
                yield result(f"{what}, {how}", "1/s", samples[one], name, samples[name], held)
        if run.usual:
            yield Result(f"{what}, {how}", "1/s", samples[one], "Flux", [1 / recorded], 1.0, note="as recorded")
        for part in ("user", "system"):
            ours, theirs = ([getattr(sample, part) or 0.01 for sample in used[name]] for name in (one, "tar"))
            yield result(f"{what}, {how}: CPU {part}", "s", ours, "tar", theirs)


# -- measures


def measure_ready(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure mounting an archive of many entries, without an index and with one."""
    document, blobs = run.archive("small")

    def sample(cold: bool) -> float:
        with run.fresh() as fresh, peers.place(run) as mountpoint:
            command = peers.zarrfs_command(document, mountpoint, fresh if cold else run.index)
            command[-1] += f",blobs={blobs}"
            took = timed(command).wall  # type: ignore[arg-type]
            subprocess.run([peers.ZARRFS, "umount", mountpoint], check=True)
        return took

    sample(False)
    samples = in_turns(rounds + 2, {"cold": lambda: sample(True), "kept": lambda: sample(False)})
    what = f"mount of an archive of {run.entries:,}"
    yield Result(f"{what}, no index yet", "s", samples["cold"], limit=0.5, at_most=True)
    yield Result(f"{what}, index kept", "s", samples["kept"])


def measure_create(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure creating an archive, beside tar and Flux."""
    for kind, what in (("small", f"{run.entries:,} x 4 KiB"), ("large", f"{run.size >> 20:,} MiB")):
        tree = run.tree(kind)

        def ours(directory: Path, tree: Path = tree) -> list[str | Path]:
            return create(tree, directory / "a.json", directory / "blobs")

        def tar(directory: Path, tree: Path = tree) -> list[str | Path]:
            return ["tar", "-cf", directory / "a.tar", "-C", tree, "."]

        works: Works = {
            "zarrfs .tar": lambda directory, tree=tree: create_tar(tree, directory / "a.tar"),
            "zarrfs": ours, "tar": tar, "tar, sync -f": lambda directory, tar=tar: synced(tar(directory), directory),
            "flux": lambda _, kind=kind, tree=tree: flux("create", "-n", f"bench-{kind}", "-C", tree, "."),
        }  # fmt: skip
        # no limit for small files as blobs: zarrfs then creates a file for each, tar only one
        limited = ("zarrfs .tar",) if kind == "small" else tuple(OURS)
        yield from compared(run, rounds, f"create of {what}", works, 0.4, FLUX[f"create {kind}"], limited)


def measure_extract(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure extracting an archive, beside tar and Flux."""
    for kind, what in (("small", f"{run.entries:,} x 4 KiB"), ("large", f"{run.size >> 20:,} MiB")):
        tree, archive, packed = run.tree(kind), run.archive(kind), run.directory / f"{kind}.tar"
        timed(["tar", "-cf", packed, "-C", tree, "."])
        ours = run.tar(kind)
        for command in extract(*archive, Path()), extract_tar(ours, Path()):
            with run.fresh() as once:
                command[command.index(Path())] = once
                timed(command)
                timed(["diff", "-rq", tree, once])

        def tar(directory: Path, packed: Path = packed) -> list[str | Path]:
            return ["tar", "-xf", packed, "-C", directory]

        works: Works = {
            "zarrfs .tar": lambda directory, ours=ours: extract_tar(ours, directory),
            "zarrfs": lambda directory, archive=archive: extract(*archive, directory), "tar": tar,
            "tar, sync -f": lambda directory, tar=tar: synced(tar(directory), directory),
            "flux": lambda directory, kind=kind: flux("extract", "-n", f"bench-{kind}", "-C", directory),
        }  # fmt: skip
        yield from compared(run, rounds, f"extract of {what}", works, 0.5, FLUX[f"extract {kind}"], tuple(OURS))
        packed.unlink()


class Remote(Tree):
    """A tree of files behind HTTP, without and with latency."""

    def _write(self) -> None:
        (self.www / "files").mkdir(parents=True)
        for number in range(REMOTE):
            (self.www / "files" / str(number)).write_bytes(os.urandom(REMOTE_SIZE))

    def names(self) -> list[str]:
        """Return the paths of the files below the server's URL."""
        return [f"files/{number}" for number in range(REMOTE)]

    def document(self, target: str) -> Path:
        """Write a reference set of the files."""
        path = self.directory / "files.json"
        path.write_text(json.dumps({"version": 1, "refs": {name: [f"{target}/{name}"] for name in self.names()}}))
        return path


def measure_stage(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure stage --copy of files at 30 ms latency, beside a download with many connections."""
    place = run.directory / "remote"
    place.mkdir()
    tree = Remote(place, 0)
    tree.start()
    try:
        url, document = tree.urls[HTTP], tree.document(tree.urls[HTTP])
        wanted = run.directory / "wanted"
        wanted.write_text("\n".join(tree.names()))
        download: list[str | Path] = [
            sys.executable, "-I", peers.HERE / "download.py", url, wanted, str(CONNECTIONS),
        ]  # fmt: skip
        used: dict[str, list[Used]] = {"zarrfs": [], "direct": []}

        def sampler(name: str, command: Callable[[Path], list[str | Path]]) -> Callable[[], float]:
            def sample() -> float:
                with run.fresh() as directory:
                    os.sync()
                    took = timed(command(directory))
                    used.get(name, []).append(took)
                    timed(["diff", "-rq", tree.www / "files", directory / "out" / "files"])
                return REMOTE / took.wall

            return sample

        def stage(*more: str) -> Callable[[Path], list[str | Path]]:
            return lambda directory: [
                peers.ZARRFS, "stage", "--copy", "-q", *more, "-o", f"index_dir={directory}/index", document,
                directory / "out",
            ]  # fmt: skip

        samples = in_turns(rounds, {
            "zarrfs": sampler("zarrfs", stage()),
            "no manifest": sampler("no manifest", stage("--no-manifest")),
            "direct": sampler("direct", lambda directory: [*download, directory / "out"]),
            "synced": sampler("synced", lambda directory: synced([*download, directory / "out"], directory)),
        })  # fmt: skip
    finally:
        tree.stop()
    what = f"{LATE} ms: stage --copy of {REMOTE:,} x {REMOTE_SIZE >> 10} KiB"
    against = f"direct, {CONNECTIONS} connections"
    yield result(what, "files/s", samples["zarrfs"], against, samples["direct"], 0.8)
    yield result(what, "files/s", samples["zarrfs"], f"{against}, sync -f", samples["synced"])
    yield result(f"{what}, no manifest", "files/s", samples["no manifest"], against, samples["direct"])
    for part in ("user", "system"):
        ours, theirs = ([getattr(one, part) or 0.01 for one in used[name]] for name in ("zarrfs", "direct"))
        yield result(f"{what}: CPU {part}", "s", ours, "direct", theirs)


def measure_copy(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure stage --copy of a Zarr store, a directory of many small chunks, beside cp -r."""
    store = run.directory / "store"
    shutil.copytree(run.tree("small"), store)
    (store / ".zgroup").write_text('{"zarr_format": 2}')
    used: dict[str, list[Used]] = {"zarrfs": [], "cp -r": []}

    def sampler(name: str, *command: str | Path) -> Callable[[], float]:
        def sample() -> float:
            with run.fresh() as directory:
                os.sync()
                used.setdefault(name, []).append(took := timed([*command, store, directory / "out"]))
                timed(["diff", "-rq", store, directory / "out"])
            return 1 / took.wall

        return sample

    samples = in_turns(rounds, {
        "zarrfs": sampler("zarrfs", peers.ZARRFS, "stage", "--copy", "-q", "--no-manifest"),
        "manifest": sampler("manifest", peers.ZARRFS, "stage", "--copy", "-q"),
        "cp -r": sampler("cp -r", "cp", "-r"),
    })  # fmt: skip
    what = f"stage --copy of a store of {run.entries:,} x 4 KiB"
    yield result(f"{what}, no manifest", "1/s", samples["zarrfs"], "cp -r", samples["cp -r"])
    yield result(what, "1/s", samples["manifest"], "cp -r", samples["cp -r"])
    for part in ("user", "system"):
        ours, theirs = ([getattr(one, part) or 0.01 for one in used[name]] for name in ("zarrfs", "cp -r"))
        yield result(f"{what}, no manifest: CPU {part}", "s", ours, "cp -r", theirs)


# -- memory


def family(pid: int) -> int:
    """Return the PSS of a process and its descendants in bytes, or the peak RSS of one of them if that is larger."""
    total, largest, left = 0, 0, [pid]
    while left:
        one = left.pop()
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{one}/smaps_rollup").read_text().split("\nPss:")[1].split()[0]) << 10
            largest = max(largest, int(Path(f"/proc/{one}/status").read_text().split("\nVmHWM:")[1].split()[0]) << 10)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                left += map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())
    return max(total, largest)


def peak(command: list[str | Path]) -> float:
    """Run a command; return the peak memory of it and its children in bytes, as family() counts it."""
    most, over = [0], threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch() -> None:
        while not over.wait(0.02):
            most[0] = max(most[0], family(process.pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        if process.wait():
            raise RuntimeError(f"{command[:3]} failed")
    finally:
        over.set()
        watching.join()
    return float(most[0])


def measure_memory(run: Archives, rounds: int) -> Iterator[Result]:
    """Measure the memory of create, mount, verify and extract for a tree of 100 GiB that is nearly all holes."""
    tree, document, blobs = run.directory / "sparse", run.directory / "sparse.json", run.directory / "sparse.blobs"
    tree.mkdir()
    each = SPARSE // 100
    for number in range(100):
        with open(tree / str(number), "wb") as file:
            for at in range(0, each, 128 * MIB):
                file.seek(at)
                file.write(os.urandom(DATA))
            file.truncate(each)
    yield memory("create", "tree", [peak(create(tree, document, blobs))])
    with remote_peers.mounted(run, document, f"blobs={blobs}") as place:
        for number in range(100):
            with open(f"{place.prefix}/{number}", "rb") as file:
                file.seek(each - 130 * MIB)
                file.read(4 * MIB)
        yield memory("mount and a little reading", "archive", [place.peak()])
    yield memory("verify", "archive", [peak([peers.ZARRFS, "archive", "verify", "--blobs", blobs, document])])
    with run.fresh() as directory:
        yield memory("extract", "archive", [peak(extract(document, blobs, directory))])
        taken, had = (sum(path.stat().st_blocks for path in top.rglob("*")) * 512 / MB for top in (directory, tree))
        yield Result("the same, on the disk", "MB", [taken], "the tree", [had], 1.1, at_most=True)


def memory(what: str, of: str, samples: list[float]) -> Result:
    return Result(f"memory: {what}, sparse {of} of {SPARSE // GIB} GiB", "MB", [one / MB for one in samples],
                  limit=300, at_most=True)  # fmt: skip


MEASURES: dict[str, Callable[[Archives, int], Iterator[Result]]] = {
    "ready": measure_ready,
    "create": measure_create,
    "extract": measure_extract,
    "stage": measure_stage,
    "copy": measure_copy,
    "memory": measure_memory,
}
