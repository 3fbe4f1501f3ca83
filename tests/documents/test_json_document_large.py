"""Large and hostile documents: time is proportional to decompressing them, memory to their longest value."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from zarrfs.documents.document import Document
from zarrfs.documents.json_document import JsonDocument
from zarrfs.system.memory import trim

MIB = 1 << 20
SIZE = 6 * MIB
ENTRIES = b",".join(b'"v/%d":["s3://bucket/%d",%d,100]' % (n, n, n * 100) for n in range(100))
HEAD = b'{"version":1,"refs":{' + ENTRIES
BLANKS = b"\n" + b" " * 63, SIZE // 64
ENTRY = b'{"mode":33188,"encoding":"utf-8","data":"x"}'
LISTED = b'{"path":"a",' + ENTRY[1:]


class Text(NamedTuple):
    """A document with a repeated part. Only `text` builds it, because every worker of xdist imports this file."""

    before: bytes
    part: bytes
    times: int
    after: bytes
    is_value: bool = False  # the repeated part is the longest value

    @property
    def text(self) -> bytes:
        return self.before + self.part * self.times + self.after


DOCUMENTS = {
    "blanks before everything": Text(b"", *BLANKS, HEAD + b"}}"),
    "blanks after a key": Text(HEAD + b',"z"', *BLANKS, b':"y"}}'),
    "blanks inside a value": Text(HEAD + b',"z":["u",', *BLANKS, b"1,2]}}", True),
    "blanks after the name refs": Text(b'{"version":1,"refs"', *BLANKS, b":{" + ENTRIES + b"}}"),
    "blanks in the root": Text(b'{"version":1', *BLANKS, b"," + HEAD[13:] + b"}}"),
    "base64": Text(HEAD + b',"z":"base64:', b"QUJD", SIZE // 4, b'"}}', True),
    "brackets as text": Text(HEAD + b',"z":"', b"{[,]}", SIZE // 5, b'"}}', True),
    "a key": Text(HEAD + b',"', b"k", SIZE, b'":"v"}}', True),
    "the same key": Text(HEAD + b",", b'"k":"0123456789",', SIZE // 17, b'"k":"v"}}'),
    "text in a list archive": Text(b'[{"path":"a","mode":33188,"encoding":"utf-8","data":"', b"x", SIZE, b'"}]', True),
}


def cpu(work: Callable[[], object], times: int = 1) -> float:
    """Return the CPU seconds of this thread for `times` calls of `work`; the kernel may count in ticks of 10 ms."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return time.thread_time() - began


def peak(work: Callable[[], object]) -> int:
    """Return the peak of additional memory (bytes) of this process during `work`.

    The result may be too high: other threads run, and the kernel creates huge pages and rereads file pages it dropped.
    """
    Path("/proc/self/clear_refs").write_text("5")  # this resets VmHWM
    before = memory("VmRSS")
    work()
    found = memory("VmHWM") - before
    trim()  # else a second call would reuse memory that the first one freed
    return found


def memory(what: str) -> int:
    return int(re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_time_and_memory(name: str) -> None:
    """The factor only tells linear from quadratic time; scripts/bench references measures real documents."""
    text = DOCUMENTS[name].text
    packed = gzip.compress(text, 6)

    def read() -> None:
        for _ in JsonDocument(Document("x.json", packed, "/", None), 1 << 30).slices(("refs",)):
            pass

    assert cpu(read) < 3 * cpu(lambda: gzip.decompress(packed), 20)
    most = 4 * MIB if not DOCUMENTS[name].is_value else 6 * MIB + 3 * len(text)
    assert any(peak(read) < most for _ in range(3))
