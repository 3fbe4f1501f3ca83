"""Open mutated samples and read everything in them: scripts/soak fuzz --help.

Each mutant must yield a one-line error or the right content: no traceback, at most 10 seconds and 300 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.conftest import DATA, PROGRAM
from tests.soak import mutants
from tests.soak.readall import TIME_MAX

MEMORY_MAX = 300 << 20  # bytes
_COMMAND = 20  # one in this many mutants is also checked by `zarrfs check`
_ZARR = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", "__zmeta__", "__zattr__", "meta", "attrs")
Options = dict[str, Any]
Entries = dict[str, str]


class Sample(NamedTuple):
    """A valid source, and the file in it that is mutated."""

    name: str
    kind: str
    source: Path  # a file, or a directory
    file: str  # the mutated file in the directory; "" if the source is a file
    options: tuple[Options, ...]  # each mutant is opened with one of them

    @property
    def data(self) -> bytes:
        """The valid bytes of the file that is mutated."""
        return (self.source / self.file if self.file else self.source).read_bytes()


class Mutant(NamedTuple):
    """A mutated sample."""

    sample: Sample
    data: bytes
    packed: str  # the compression, as a suffix; "" for none
    broken: bool  # whether the compressed bytes were mutated instead of the content
    options: Options


def samples(directory: Path) -> list[Sample]:
    """Return all samples; make those that are not in tests/data in `directory`."""
    found = []
    plain: tuple[Options, ...] = ({}, {"strict": True}, {"conflict": "file"})
    views: tuple[Options, ...] = ({}, {"view": "v2"}, {"view": "v3"}, {"view": "arrays"})
    for path in sorted((DATA / "references").glob("*.json")):
        if path.name != "expected.json":
            made = directory / path.name
            made.write_text(path.read_text().replace("@DATA@", str(DATA / "references/data")))
            found.append(Sample(path.name, "references", made, "", plain + views))
            if path.name in ("day1_v1.json", "combined_v1.json"):
                _command("refs", "convert", made, directory / f"{path.stem}.parquet")
    blobs = {"blobs": [str(DATA / "archives/blobs")]}
    for name in ("flux-list.json", "flux-dict.json", "jobspec.json"):
        found.append(Sample(name, "archive", DATA / "archives" / name, "", (blobs, blobs | {"compat": True}, {})))
    for parquet in sorted(directory.glob("*.parquet")):
        found += _files(parquet, "parquet", views, lambda path: path.suffix == ".parq" or path.name == ".zmetadata")
    for store in sorted((DATA / "zarr").iterdir()):
        if store.is_dir():
            found += _files(store, "zarr", views, lambda path: path.name in _ZARR or path.suffix == ".json")
    for name in ("v2_hier", "v3_hier"):
        packed = shutil.make_archive(str(directory / name), "zip", DATA / "zarr" / name)
        found.append(Sample(f"{name}.zip", "zip", Path(packed), "", views))
    return found


def _files(source: Path, kind: str, options: tuple[Options, ...], wanted: Callable[[Path], bool]) -> list[Sample]:
    paths = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file() and wanted(path))
    return [Sample(f"{source.name}/{path}", kind, source, str(path), options) for path in paths[:8] + paths[-2:]]


@st.composite
def mutant(draw: st.DrawFn, known: dict[str, list[Sample]]) -> Mutant:
    """Draw a mutant of any sample: the kind first, as there are many more Zarr stores than reference sets."""
    sample = draw(st.sampled_from(known[draw(st.sampled_from(sorted(known)))]))
    data = sample.data
    options = draw(st.sampled_from(sample.options))
    if sample.kind == "zip" or sample.file.endswith(".parq"):
        return Mutant(sample, _near_the_end(draw, data), "", True, options)
    packed = "" if sample.file else draw(st.sampled_from(("", "", *mutants.PACKERS)))
    if packed and draw(st.integers(0, 3)) == 0:
        return Mutant(sample, draw(mutants.bytes_of(mutants.PACKERS[packed](data))), packed, True, options)
    return Mutant(sample, mutants.PACKERS[packed](draw(mutants.text_of(data))), packed, False, options)


def _near_the_end(draw: st.DrawFn, data: bytes) -> bytes:
    """Mutate `data` anywhere, in its second half, or near its end, where zip and Parquet have their directories."""
    at = draw(st.sampled_from((0, 0, max(0, len(data) - 200), max(0, len(data) - 2000), len(data) // 2)))
    return data[:at] + draw(mutants.bytes_of(data[at:], mutants.NUMBERS))


def _command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, errors="backslashreplace")


class Reader:
    """The child process that reads sources: tests/soak/readall.py."""

    def __init__(self, directory: Path) -> None:
        environment = os.environ | {"XDG_CACHE_HOME": str(directory / "cache"), "XDG_CONFIG_HOME": str(directory)}
        self._errors = open(directory / "reader.stderr", "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.readall"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self._errors, env=environment, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def read(self, source: Path, options: Options, index: Path) -> dict[str, Any]:
        """Return what readall.py found in a source, with its standard error as "stderr"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        options = {"index_dir": str(index), "retries": 0, "request_timeout": 2.0, "log_level": "error"} | options
        self._process.stdin.write(json.dumps({"source": str(source), "options": options}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        self._errors.seek(0)
        found["stderr"] = self._errors.read().decode(errors="backslashreplace")
        self._errors.seek(0)
        self._errors.truncate()
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._errors.close()


class Fuzz:
    """One run: the samples, their right content, and the violations that mutants caused."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.counts: Counter[str] = Counter()
        self.violations: dict[str, str] = {}  # by kind of violation: the first mutant that caused it, and the details
        self.slowest, self.largest = (0.0, ""), (0, "")
        (directory / "samples").mkdir()
        self._reader = Reader(directory)
        self._judged = 0
        self._right: dict[str, Entries] = {}
        self.samples: dict[str, list[Sample]] = {}
        for sample in samples(directory / "samples"):
            self.samples.setdefault(sample.kind, []).append(sample)

    def close(self) -> None:
        """End the reader process."""
        self._reader.close()

    def judge(self, case: Mutant) -> list[str]:
        """Read a mutant; record and return its violations."""
        self.counts[case.sample.kind] += 1
        self._judged += 1
        with self._written(case) as source:
            found = self._reader.read(source, case.options, self.directory / "index")
            wrong = _ill(found)
            if not wrong:
                wrong = self._wrong_answers(case, found, source)
            if not wrong and self._judged % _COMMAND == 0:
                wrong = self._command(case, source, found)
            self.counts["refused" if "error" in found else "read"] += 1
            self.slowest = max(self.slowest, (found["seconds"], case.sample.name))
            self.largest = max(self.largest, (found["memory"], case.sample.name))
            for what in wrong:
                self._note(case, source, what)
        shutil.rmtree(self.directory / "index", ignore_errors=True)
        return wrong

    def _note(self, case: Mutant, source: Path, what: str) -> None:
        kind = f"{case.sample.kind}: {what.strip().splitlines()[-1][:100]}"
        if kind not in self.violations:
            kept = self.directory / f"violation-{len(self.violations)}" / source.name
            kept.parent.mkdir()
            (shutil.copytree if source.is_dir() else shutil.copy)(source, kept)
            self.violations[kind] = f"{kept} {json.dumps(case.options)}\n{what}"
        self.counts["violations"] += 1

    @contextlib.contextmanager
    def _written(self, case: Mutant) -> Iterator[Path]:
        place = self.directory / "mutant"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        source = place / (case.sample.source.name + (f".{case.packed}" if case.packed else ""))
        if case.sample.file:
            shutil.copytree(case.sample.source, source)
            (source / case.sample.file).write_bytes(case.data)
        else:
            source.write_bytes(case.data)
        yield source

    def _right_entries(self, sample: Sample, options: Options) -> Entries:
        name = f"{sample.source} {json.dumps(options)}"
        if name not in self._right:
            found = self._reader.read(sample.source, options, self.directory / "index")
            if _ill(found):
                raise RuntimeError(f"{name}: {_ill(found)}")
            self._right[name] = found.get("entries", {})
        return self._right[name]

    def _wrong_answers(self, case: Mutant, found: dict[str, Any], source: Path) -> list[str]:
        if case.options.get("view"):
            return []
        entries: Entries = found.get("entries", {})
        right = self._right_entries(case.sample, case.options)
        match case.sample.kind:
            case "references" | "archive" if not case.broken:
                text = case.sample.data
                mutated = _unpacked(case)
                old, new = _parsed(text), _parsed(mutated)
                if new is _UNKNOWN:
                    return []
                if new is None:
                    return [] if "error" in found else ["accepted, but it is not JSON"]
                same = right.keys() if _same(old, new) else untouched(old, new)
                if _same(old, new) and "error" in found:
                    return [f"refused, but it says the same: {found['error']}"] if right else []
            case "zarr":
                same = right.keys() - {case.sample.file}
            case "zip":
                same = _sound(source, case.sample.source) & entries.keys()
            case _:
                return []
        if "error" in found:
            return []
        return [
            f"wrong: {key}: {entries.get(key, 'not there')}, not {right[key]}"
            for key in sorted(same)
            if key in right and not right[key].startswith("!") and entries.get(key, "") != right[key]
            and not (case.sample.kind == "zip" and entries[key].startswith("!"))
        ][:3]  # fmt: skip

    def _command(self, case: Mutant, source: Path, found: dict[str, Any]) -> list[str]:
        """Run `zarrfs check` on the mutant: it must not crash, and must report an error if the reader did."""
        self.counts["by command"] += 1
        options = ",".join(
            name if value is True else f"{name}={':'.join(value) if isinstance(value, list) else value}"
            for name, value in case.options.items()
        )
        done = _command("check", source, *(("--option", options) if options else ()))
        if "Traceback" in done.stderr or "internal error" in done.stderr or done.returncode not in (0, 1):
            return [f"zarrfs check: status {done.returncode}: {done.stderr}"]
        if "error" in found and (done.returncode != 1 or not done.stderr.strip()):
            return [f"zarrfs check: no error: status {done.returncode}: {done.stdout}{done.stderr}"]
        if "error" in found and not done.stderr.splitlines()[-1].startswith("zarrfs: "):
            return [f"zarrfs check: not one line: {done.stderr}"]
        return []


_UNKNOWN = object()


def _ill(found: dict[str, Any]) -> list[str]:
    """Return the rules that reading a source broke: on exceptions, time, exit status, memory and error text."""
    wrong = [f"unexpected: {text}" for text in found.get("unexpected", ())]
    if found["late"]:
        wrong.append(f"took more than {TIME_MAX} s")
    elif found["status"]:
        wrong.append(f"ended with status {found['status']}: {found['stderr']}")
    if found["memory"] > MEMORY_MAX:
        wrong.append(f"took more memory than {MEMORY_MAX >> 20} MiB: {found['memory'] >> 20}")
    if "Traceback" in found["stderr"]:
        wrong.append(f"a traceback: {found['stderr']}")
    error = found.get("error")
    if error is not None and ("\n" in error.strip() or not error.strip() or len(error) > 4000 or error.endswith(": ")):
        wrong.append(f"not an error of one line: {error!r}")
    return wrong


def _parsed(data: bytes) -> Any:
    """Parse with the standard library: None if it is not JSON, _UNKNOWN if it exceeds that parser's limits."""
    try:
        return json.loads(data)
    except RecursionError:
        return _UNKNOWN
    except ValueError as exc:
        return _UNKNOWN if "Exceeds the limit" in str(exc) else None


def _unpacked(case: Mutant) -> bytes:
    import bz2
    import gzip
    import lzma

    import zstandard

    unpack: dict[str, Callable[[bytes], bytes]] = {
        "": bytes, "gz": gzip.decompress, "xz": lzma.decompress, "bz2": bz2.decompress,
        "zst": lambda data: zstandard.ZstdDecompressor().decompress(data),
    }  # fmt: skip
    return unpack[case.packed](case.data)


def _same(one: Any, two: Any) -> bool:
    return json.dumps(one) == json.dumps(two)


def untouched(old: Any, new: Any) -> set[str]:
    """Return the entries that both documents have and that their differences cannot affect."""
    if isinstance(old, list) and isinstance(new, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in old + new):
            return set()
        paths = [entry["path"] for entry in new]
        old = {entry["path"]: entry for entry in old}
        new = {entry["path"]: entry for entry in new if paths.count(entry["path"]) == 1}
    elif isinstance(old, dict) and isinstance(new, dict):
        if "version" in old:
            if not all(_same(old.get(name), new.get(name)) for name in ("version", "templates", "gen")):
                return set()
            old, new = old.get("refs", {}), new.get("refs", {})
        elif "version" in new or "refs" in new or "jobspec" in old or "attributes" in old:
            return set()
    if not isinstance(old, dict) or not isinstance(new, dict):
        return set()
    same = {key for key in old.keys() & new.keys() if _same(old[key], new[key])}
    changed = {key.strip("/") for key in (old.keys() | new.keys()) - same}
    parents = {key[:at] for key in changed for at, char in enumerate(key) if char == "/"} | changed
    return {key for key in same if key not in parents and not any(key.startswith(f"{one}/") for one in changed if one)}


def _sound(mutated: Path, genuine: Path) -> set[str]:
    """Return the members of a mutated zip file that the standard library reads with their original content."""
    try:
        with zipfile.ZipFile(mutated) as new, zipfile.ZipFile(genuine) as old:
            names = [name for name in new.namelist() if name in old.NameToInfo and new.namelist().count(name) == 1]
            return {name for name in names if _member(new, name) == old.read(name)}
    except Exception:
        return set()


def _member(file: zipfile.ZipFile, name: str) -> bytes | None:
    try:
        return file.read(name)
    except Exception:
        return None


def run(fuzz: Fuzz, number: int, examples: int, until: float, failing: bool = False) -> None:
    """Judge up to `examples` mutants, none after `until` (time.monotonic()); `failing`: raise on a violation."""

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    @given(mutant(fuzz.samples))
    def one(case: Mutant) -> None:
        if time.monotonic() < until:
            wrong = fuzz.judge(case)
            assert not (failing and wrong), wrong

    one()


def main() -> int:
    """Judge mutants until the time is over. Return 1, and keep the directory, if there was a violation."""
    parser = argparse.ArgumentParser(prog="scripts/soak fuzz", description="Open mutated samples, read all in them.")
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), metavar="N", help="of all random numbers")
    parser.add_argument("--directory", metavar="DIR", help="where all is made (default: one in the system's)")
    parser.add_argument("--report", metavar="FILE", help="write the report here, too")
    chosen = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="zarrfs-fuzz-", dir=chosen.directory))
    print(f"fuzz: {chosen.minutes:g} minutes, seed {chosen.seed}, in {directory}", flush=True)
    began = time.monotonic()
    fuzz, number = Fuzz(directory), chosen.seed
    try:
        while time.monotonic() < began + chosen.minutes * 60:
            run(fuzz, number, 200, began + chosen.minutes * 60)
            number += 1
            if chosen.report:
                Path(chosen.report).write_text(report(fuzz, chosen.seed, began))
    finally:
        fuzz.close()
    print(report(fuzz, chosen.seed, began), end="")
    if fuzz.violations:
        print(f"fuzz: failed; mutants are in {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


def report(fuzz: Fuzz, number: int, began: float) -> str:
    """Format the report: counts, the slowest and the largest mutant, and violations."""
    lines = [f"fuzz: {time.monotonic() - began:.0f} s, seed {number}", ""]
    lines += [f"{name:12} {count:>8,}" for name, count in sorted(fuzz.counts.items())]
    lines += [f"slowest      {fuzz.slowest[0]:>8.2f} s    {fuzz.slowest[1]}"]
    lines += [f"largest      {fuzz.largest[0] >> 20:>8,} MiB  {fuzz.largest[1]}"]
    lines += ["", f"violations: {len(fuzz.violations)}", *fuzz.violations.values()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
