"""The commands zarrfs archive extract, list, verify and diff."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.archives.compiled import L, blobref, file, opened, put
from tests.conftest import DATA, PROGRAM, run
from tests.copying.extracting import look, snapshot, write

SAMPLES = DATA / "archives"


def archive(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return job.json, an archive of three files, a directory and a link; the data of in/b.bin is a blob in blobs."""
    (tmp_path / "blobs").mkdir()
    ref = put(tmp_path / "blobs", b"big" * 1000)
    return archive(
        tmp_path / "job.json",
        [
            {"path": "in", "mode": 0o40750, "mtime": 1000},
            {"path": "in/a.txt", **file("one\n", mtime=1000)},
            {"path": "in/b.bin", **file([[0, 3000, ref]], encoding="blobvec", size=3000, mtime=2000)},
            {"path": "in/link", "mode": L, "data": "a.txt", "mtime": 3000},
            {"path": "new\nline", **file("", mtime=4000, mode=0o100600)},
        ],
    )


def test_a_sample_made_by_flux_is_extracted_as_recorded(tmp_path: Path) -> None:
    done = run("archive", "extract", SAMPLES / "flux-list.json", "-C", tmp_path / "out", "--blobs", SAMPLES / "blobs")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = snapshot(tmp_path / "out")
    expected = json.loads((SAMPLES / "expected.json").read_text())
    assert found.keys() - {""} == expected.keys()
    for key, entry in expected.items():
        assert found[key].mode == entry["mode"] & 0o7777 or "target" in entry
        assert "mtime" not in entry or found[key].mtime_ns == entry["mtime"] * 10**9
        assert "size" not in entry or len(found[key].data or b"") == entry["size"]
    assert run("check", SAMPLES / "flux-list.json", "--blobs", SAMPLES / "blobs").returncode == 0


def test_extract_obeys_its_patterns_and_its_options_for_existing_files(job: Path) -> None:
    out, blobs = job.parent / "out", ("--blobs", job.parent / "blobs")
    done = run("archive", "extract", "-v", job, "*.txt", "--exclude", "new*", "-C", out, *blobs)
    assert (done.returncode, done.stdout) == (0, "in/a.txt\nin\n")
    assert set(snapshot(out)) == {"", "in", "in/a.txt"}
    done = run("archive", "extract", job, "-C", out, *blobs)
    rule = "is there already: see --overwrite, --keep and --update"
    assert (done.returncode, done.stderr) == (1, f"zarrfs: {out}: in/a.txt: {rule}\n")
    (out / "in/a.txt").write_text("mine")
    assert run("archive", "extract", job, "-C", out, "--keep", *blobs).returncode == 0
    assert (out / "in/a.txt").read_text() == "mine"
    assert (out / "in/b.bin").read_bytes() == b"big" * 1000
    assert run("archive", "extract", job, "-C", out, "--update", *blobs).returncode == 0
    assert (out / "in/a.txt").read_text() == "mine"
    assert run("archive", "extract", job, "-C", out, "--overwrite", *blobs).returncode == 0
    assert (out / "in/a.txt").read_text() == "one\n"
    done = run("archive", "extract", job, "-C", out, "--overwrite", "--keep", *blobs)
    assert (done.returncode, done.stderr) == (2, "zarrfs: --overwrite and --keep exclude each other\n")
    done = run("archive", "extract", job, "nope", "in/a*", "-C", job.parent / "other", *blobs)
    assert (done.returncode, done.stderr) == (1, f"zarrfs: {job}: nothing in it matches nope\n")
    assert look(job.parent / "other/in/a.txt").data == b"one\n"
    assert run("archive", "extract", job, "nope", "-C", job.parent / "none", *blobs).returncode == 1
    assert not (job.parent / "none").exists()


def test_an_archive_is_extracted_from_standard_input(job: Path) -> None:
    command = [PROGRAM, "archive", "extract", "-", "-C", "here", "--blobs", "blobs"]
    done = subprocess.run(command, input=job.read_bytes(), cwd=job.parent, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (job.parent / "here/in/b.bin").read_bytes() == b"big" * 1000
    bad = json.dumps([{"path": "../x", **file("")}]).encode()
    done = subprocess.run(command, input=bad, cwd=job.parent, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (
        1, b"zarrfs: warning: ../x: a path with a part '..': left out\nzarrfs: here: ../x: a path with a part '..'\n",
    )


def test_an_extraction_from_standard_input_resumes(tmp_path: Path) -> None:
    """Entries without times, as in a jobspec, take that of the temporary file, which differs in each run."""
    blob, blobs = b"x" * 5000, tmp_path / "blobs"
    blobs.mkdir()
    lost = put(blobs, blob)
    (blobs / lost).rename(tmp_path / "lost")
    entries = [{"path": "a", "mode": 0o100644, "data": "1", "encoding": "utf-8"}]
    entries.append({"path": "d/b", **file([[0, 5000, lost]], encoding="blobvec", size=5000)})
    command = [PROGRAM, "archive", "extract", "-", "-C", tmp_path / "out", "--blobs", blobs]
    document = json.dumps(entries).encode()
    assert subprocess.run(command, input=document, capture_output=True, check=False).returncode == 1
    assert os.listdir(tmp_path / "out/.zarrfs-staging") == ["note"]
    (tmp_path / "lost").rename(blobs / lost)
    done = subprocess.run(command, input=document, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "out/d/b").read_bytes() == blob


def test_a_run_without_set_ids_does_not_resume_one_that_kept_them(tmp_path: Path) -> None:
    lost = "sha1-" + "0" * 40
    entries = [{"path": "a", **file("1", mode=0o104755)}]
    entries.append({"path": "d/b", **file([[0, 1, lost]], encoding="blobvec", size=1)})
    (tmp_path / "blobs").mkdir()
    command = ("archive", "extract", archive(tmp_path / "a.json", entries), "-C", tmp_path / "out")
    command = (*command, "--blobs", tmp_path / "blobs")
    assert run(*command).returncode == 1
    assert stat.S_IMODE((tmp_path / "out/a").stat().st_mode) == 0o4755
    done = run(*command, "--no-set-id", "--keep-going")
    assert (done.returncode, "a: is there already" in done.stderr) == (1, True)
    assert run(*command, "--no-set-id", "--keep-going", "--overwrite").returncode == 1
    assert stat.S_IMODE((tmp_path / "out/a").stat().st_mode) == 0o755


@pytest.mark.parametrize("command", ["extract"])
@pytest.mark.parametrize("source", ["zarr/v2_hier", "references"])
def test_other_sources_are_refused(command: str, source: str, tmp_path: Path, references: Path) -> None:
    place = sorted(references.glob("*.json"))[0] if source == "references" else DATA / source
    done = run("archive", command, place, *(("-C", tmp_path / "out") if command == "extract" else ()), "-q")
    assert done.returncode == 1
    assert done.stderr == f"zarrfs: {place}: is not a file archive; `zarrfs copy` copies other sources\n"
    assert not (tmp_path / "out").exists()


# -- damaged and missing blobs


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return an archive with 40 good files and one file for each kind of bad blob, and {bad file: the kind}."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    entries, wrong = [], {}
    for index in range(40):
        ref = put(blobs, b"%d" % index * 1000)
        length = 1000 * len(str(index))
        entries.append({"path": f"good/{index}", **file([[0, length, ref]], encoding="blobvec", size=length)})
    kinds = {"lying": "wrong hash", "short": "out of range", "lost": "missing", "fifo": "unreadable"}
    for name, kind in kinds.items():
        ref = put(blobs, name.encode() * 1000)
        length = 1000 * len(name)
        path = blobs / ref
        if name == "lying":
            path.write_bytes(b"-" * length)
        elif name == "short":
            path.write_bytes(b"-")
        else:
            path.unlink()
            if name == "fifo":
                os.mkfifo(path)
        wrong[f"bad/{name}"] = kind
        good = put(blobs, b"g" * 5000)  # the bad blob follows a good one
        vec = [[0, 5000, good], [5000, length, ref]]
        entries.append({"path": f"bad/{name}", **file(vec, encoding="blobvec", size=5000 + length)})
    return archive(tmp_path / "a.json", entries), wrong


def test_a_bad_blob_ends_an_extraction(damaged: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    document, wrong = damaged
    done = run("archive", "extract", document, "-C", tmp_path / "out", "--blobs", tmp_path / "blobs", "--jobs", "1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"zarrfs: {tmp_path}/out: bad/")
    assert "sha1-" in done.stderr
    assert not any((tmp_path / "out" / key).exists() for key in wrong)


def test_keep_going_extracts_every_file_whose_blobs_are_good(
    damaged: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    document, wrong = damaged
    out = tmp_path / "out"
    done = run("archive", "extract", document, "-C", out, "--blobs", tmp_path / "blobs", "--keep-going")
    assert done.returncode == 1
    assert sorted(line.split(": ")[1] for line in done.stderr.splitlines()) == sorted(wrong)
    assert all("sha1-" in line for line in done.stderr.splitlines())
    assert set(snapshot(out)) == {"", "bad", "good", *(f"good/{index}" for index in range(40))}
    for index in range(40):
        assert (out / f"good/{index}").read_bytes() == b"%d" % index * 1000
    ref = blobref(b"lost" * 1000)
    (tmp_path / "blobs" / ref).write_bytes(b"lost" * 1000)
    done = run("archive", "extract", document, "-C", out, "--blobs", tmp_path / "blobs", "--keep", "--keep-going")
    assert done.returncode == 1
    assert (out / "bad/lost").read_bytes() == b"g" * 5000 + b"lost" * 1000


def test_verify_names_every_bad_file(damaged: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    document, wrong = damaged
    done = run("check", document, "--blobs", tmp_path / "blobs", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["clean"]) == (1, 40, False)
    assert {bad["key"]: bad["kind"] for bad in report["bad"]} == wrong
    assert all("sha1-" in bad["url"] for bad in report["bad"])
    done = run("check", document, "--blobs", tmp_path / "blobs")
    assert done.returncode == 1
    assert {line.split(": ")[1] for line in done.stdout.splitlines() if ": bad/" in line} == wrong.keys()
    assert all("sha1-" in line for line in done.stdout.splitlines() if ": bad/" in line)


# -- diff


# -- round trip


def test_creating_and_extracting_an_archive_restores_the_tree(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/big").write_bytes(os.urandom(3 << 20))
    (source / "a/small").write_bytes(b"\0\xff")
    (source / "a/text").write_text("text")
    (source / "empty").mkdir(mode=0o2700)
    (source / "link").symlink_to("a/b")
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"x", 1 << 29)
    (source / "a/small").chmod(0o4711)
    for name in ("a/b/big", "a/small", "a/text", "a/b", "a", "empty", "link", "sparse", "."):
        os.utime(source / name, (1_500_000_000, 1_500_000_000), follow_symlinks=False)
    blobs = ("--blobs", tmp_path / "blobs")
    assert run("archive", "create", "-C", source, "-O", tmp_path / "a.json", *blobs, ".").returncode == 0
    assert run("archive", "extract", tmp_path / "a.json", "-C", tmp_path / "out", *blobs).returncode == 0
    found, expected = snapshot(tmp_path / "out"), snapshot(source)
    del found[""], expected[""]  # the directory itself is not in the archive
    assert found == expected
    assert os.stat(tmp_path / "out/sparse").st_blocks == os.stat(source / "sparse").st_blocks
    plain = ("-C", tmp_path / "plain", "--no-set-id")
    assert run("archive", "extract", tmp_path / "a.json", *plain, *blobs).returncode == 0
    assert stat.S_IMODE(os.stat(tmp_path / "plain/a/small").st_mode) == 0o711, "who executes it would act as we"


@pytest.mark.parametrize("command", ["extract"])
@pytest.mark.parametrize("document", ["{}", "[]", '{"version": 1, "refs": {}}'])
def test_an_empty_archive_is_no_error(command: str, document: str, tmp_path: Path) -> None:
    """`{}` is a valid reference set as well."""
    (tmp_path / "a.json").write_text(document)
    (tmp_path / "out").mkdir()
    more = {"extract": ["-C", tmp_path / "out"], "diff": ["--exit-code", tmp_path / "out"]}.get(command, [])
    done = run("archive", command, tmp_path / "a.json", *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("existing", [(), ("--overwrite",)])
def test_an_existing_directory_keeps_its_mode(named: bool, existing: tuple[str, ...], tmp_path: Path) -> None:
    """Unless the archive has an entry for its top directory."""
    entries = [{"path": ".", "mode": 0o40711, "mtime": 5}] if named else []
    (tmp_path / "a.json").write_text(json.dumps([*entries, {"path": "f", "mode": 0o100644, "size": 0, "mtime": 1}]))
    out = tmp_path / "out"
    out.mkdir(mode=0o2775)
    out.chmod(0o2775)
    assert run("archive", "extract", tmp_path / "a.json", "-C", out, *existing).returncode == 0
    assert stat.S_IMODE(out.stat().st_mode) == (0o711 if named else 0o2775)
    assert (out.stat().st_mtime == 5) is named


def test_extraction_into_a_directory_of_another_user(tmp_path: Path) -> None:
    """As in a shared scratch directory: its mode cannot be changed, and that is no error."""
    document = {".": {"mode": 0o40755, "mtime": 5}, "f": file("x")}
    out = Path(tempfile.mkdtemp())
    out.chmod(0o777)
    with opened(document, type="archive") as (store, _plan):
        write(store, tmp_path / "first", root=True)  # imports all modules, which user nobody may not be able to read
        child = os.fork()
        if not child:
            try:
                os.setgid(65534)
                os.setuid(65534)
                write(store, out, root=True)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o777
    assert (out / "f").stat().st_uid == 65534
    shutil.rmtree(out)


def test_an_extraction_with_patterns_leaves_an_unfinished_one_resumable(tmp_path: Path) -> None:
    """A refused extraction of another archive leaves it resumable, too."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for number in range(20):
        (source / f"f{number:02}").write_text(str(number))
    blobs = ("--blobs", tmp_path / "blobs")
    create = ("archive", "create", "-C", source, "--inline-threshold", "0", *blobs)
    assert run(*create, "-O", tmp_path / "a.json", ".").returncode == 0
    assert run(*create, "-O", tmp_path / "b.json", "f00").returncode == 0
    [lost] = [path for path in (tmp_path / "blobs").iterdir() if path.read_text() == "15"]
    lost.rename(tmp_path / "lost")
    extract = ("archive", "extract", tmp_path / "a.json", "-C", out, *blobs)
    assert run(*extract).returncode == 1
    assert (out / ".zarrfs-staging/note").exists()
    assert run(*extract, "f01").returncode == 0
    assert run("archive", "extract", tmp_path / "b.json", "-C", out, *blobs).returncode == 1
    (tmp_path / "lost").rename(lost)
    done = run(*extract)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(out)) == sorted(os.listdir(source))


def test_user_files_at_a_reserved_name_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"path": "f", "mode": 33188, "size": 0}]')
    (tmp_path / "out/.zarrfs-staging").mkdir(parents=True)
    (tmp_path / "out/.zarrfs-staging/mine").write_text("precious")
    assert run("archive", "extract", tmp_path / "a.json", "-C", tmp_path / "out").returncode == 0
    assert (tmp_path / "out/.zarrfs-staging/mine").read_text() == "precious"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.zarrfs-staging").touch()
    done = run("archive", "extract", tmp_path / "a.json", "-C", tmp_path / "other")
    rule = ".zarrfs-staging in it, which is reserved, is no directory"
    assert (done.returncode, done.stderr) == (2, f"zarrfs: {tmp_path}/other: {rule}\n")


def test_files_that_report_size_0_but_have_content_are_refused() -> None:
    done = run("archive", "create", "-C", "/proc/self", "--inline", "status")
    assert done.returncode == 1
    assert "status: bytes in a file whose size is 0, as of /proc: no archive can hold it;" in done.stderr
