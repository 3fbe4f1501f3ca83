"""Codecs that other packages register with numcodecs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest

from tests.decoders import decoders, kill_decoders
from tests.mounts.mounting import until
from tests.zarr.chunks import array_of
from zarrfs.system import bounded
from zarrfs.system.processes import children, is_running
from zarrfs.zarr import external
from zarrfs.zarr.codecs import CodecError, decode_chunk

INSTALLED = """
import os, time
import numpy as np
from numcodecs.abc import Codec

class Bomb(Codec):
    codec_id = "zarrfs-tests-bomb"

    def __init__(self, does="fill"):
        self.does = does

    def encode(self, buf):
        raise NotImplementedError

    def decode(self, buf, out=None):
        if self.does == "die":
            os.abort()
        if self.does == "hang":
            time.sleep(60)
        if self.does == "dtype":
            return np.frombuffer(buf, "<i2") + np.int16(1)
        if self.does == "print":
            print("to standard output", flush=True)
        if self.does == "first":
            buf = bytes(buf[:8])
        if self.does == "count":
            buf = bytes(buf).count(b" ").to_bytes(8, "little")
        return np.ones(int.from_bytes(bytes(buf), "little"), np.uint8)  # as many as the chunk claims
"""


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a package with a codec that allocates as much as a chunk claims; yield the name of the codec."""
    (tmp_path / "zarrfs_tests_bomb.py").write_text(INSTALLED)
    about = tmp_path / "zarrfs_tests_bomb-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: zarrfs-tests-bomb\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[numcodecs.codecs]\nzarrfs-tests-bomb = zarrfs_tests_bomb:Bomb\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    numcodecs.registry.run_entrypoints()
    yield "numcodecs.zarrfs-tests-bomb"
    monkeypatch.undo()
    numcodecs.registry.run_entrypoints()
    kill_decoders()  # idle children have this test's directory in sys.path


def bombed(name: str, size: int, **configuration: Any) -> Any:
    array = array_of("|u1", (1000,), ("bytes", {}), (name, configuration))
    return decode_chunk(array, size.to_bytes(8, "little"))


def test_memory_of_an_external_codec_is_bounded(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert bombed(bomb, 1000).tolist() == [1] * 1000
    for size in (3 << 30, 1 << 45):
        with pytest.raises(CodecError, match="bomb: needs far more memory than the 1000 bytes of the chunk"):
            bombed(bomb, size)
    with pytest.raises(CodecError, match="zarrfs-tests-bomb: decodes to 100000 bytes, not 1000"):
        bombed(bomb, 100_000)
    assert bombed(bomb, 1000).tolist() == [1] * 1000  # the codec works afterwards
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB, of this process


def test_a_child_process_receives_a_larger_chunk_than_it_could_decode_before(bomb: str) -> None:
    assert bombed(bomb, 1000).tolist() == [1] * 1000
    before = children()
    stored = (1000).to_bytes(300 << 20, "little")
    codec = external.ExternalCodec(bomb.removeprefix("numcodecs."), {"does": "first"}, 1000)
    assert bytes(codec.decode(stored)) == bytes([1]) * 1000
    assert children() == before


def test_input_of_an_external_codec_may_be_numbers_or_much_longer_than_its_items(bomb: str) -> None:
    """The text of a FITS table is one such input."""
    array = array_of("|u1", (1000,), ("bytes", {}), (bomb, {"does": "count"}))
    text = b"x" * 200 + b" "
    assert decode_chunk(array, text * 1000).tobytes() == b"\1" * 1000
    array = array_of("<i2", (3,), (bomb, {"does": "dtype"}), generation="v2")
    assert decode_chunk(array, np.array([1, 2, 3], "<i2").tobytes()).tolist() == [2, 3, 4]


def test_an_external_codec_that_dies_or_stops_is_an_error(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CodecError, match=r"zarrfs-tests-bomb: .*unexpected keyword argument 'nonsense'"):
        bombed(bomb, 1000, nonsense=1)
    assert bombed(bomb, 1000, does="print").tolist() == [1] * 1000
    with pytest.raises(CodecError, match="zarrfs-tests-bomb: the process that decoded has ended with status -6"):
        bombed(bomb, 1000, does="die")
    bombed(bomb, 1000)  # starts the next child process
    kill_decoders()  # a chunk is decoded although the idle child was killed
    assert bombed(bomb, 1000).tolist() == [1] * 1000
    codec = external.ExternalCodec(bomb.removeprefix("numcodecs."), {"does": "first"}, 1000)
    for child in decoders():
        os.kill(child, signal.SIGSTOP)
    monkeypatch.setattr(bounded, "TIMEOUT", 0.2)
    with pytest.raises(CodecError, match=r"no answer within 0\.2 s"):
        codec.decode((1000).to_bytes(1 << 20, "little"))  # more than the pipe holds


def test_an_idle_child_process_ends(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_decoders()
    monkeypatch.setattr(bounded, "IDLE", 1.0)
    assert bombed(bomb, 1000).tolist() == [1] * 1000
    until(lambda: not decoders(), 30)
    assert bombed(bomb, 1000).tolist() == [1] * 1000


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from zarrfs.system import bounded
from zarrfs.zarr.external import ExternalCodec

codec = ExternalCodec({codec!r}, {{"does": "hang"}}, 1000)
bounded.TIMEOUT = 2
print("made", flush=True)
codec.decode(bytes(8))
"""


def test_a_child_process_that_hangs_ends_although_its_parent_was_killed(bomb: str) -> None:
    program = PROGRAM.format(paths=[path for path in sys.path if path], codec=bomb.removeprefix("numcodecs."))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        assert os.getsid(child) == child  # Ctrl-C in the terminal of its parent does not reach it
        process.kill()
    until(lambda: not is_running(child), 30)
