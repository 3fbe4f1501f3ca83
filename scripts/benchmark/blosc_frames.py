"""Blosc frames: `scripts/bench blosc`. The packages numcodecs and blosc decode frames of C-Blosc.

Speed is measured in a worker thread, with one thread per frame, into a preallocated buffer. Damaged frames are decoded
in child processes between inaccessible pages: a read or write out of bounds kills the child.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import mmap
import os
import random
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import blosc
import numcodecs.blosc
import numpy as np
from measures import Result, interleaved

from zarrfs.zarr.blosc import parse_header
from zarrfs.zarr.errors import CodecError

NOTES = "Decoding in one worker thread, into memory that is there; µs a frame."
CNAMES = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")
SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "4 MiB": 4 << 20}
TYPESIZES = (1, 2, 3, 4, 7, 8, 12, 16, 17, 32, 255)
MUTANTS = 50_000  # damaged frames for each package, with and without the checks of zarrfs
_BATCH = 500  # frames per child
_PROT_NONE, _PROT_BOTH = 0, 3

Into = Callable[[Any, "np.ndarray[Any, Any]"], None]


def by_numcodecs(frame: Any, out: np.ndarray[Any, Any]) -> None:
    """Decode into `out` with numcodecs."""
    numcodecs.blosc.decompress(frame, out)


def by_blosc(frame: Any, out: np.ndarray[Any, Any]) -> None:
    """Decode into `out` with the package blosc, which checks neither the size of `out` nor that of the frame."""
    blosc.decompress_ptr(frame, out.ctypes.data)


PACKAGES: dict[str, Into] = {"numcodecs": by_numcodecs, "blosc": by_blosc}


def content(size: int, seed: int = 0) -> bytes:
    """Return floats with a little noise, like measured values."""
    rng = np.random.default_rng(seed)
    items = np.round(280 + np.cumsum(rng.normal(size=size // 4 + 1)) * 0.05, 2).astype("<f4")
    return items.tobytes()[:size]


def framed(data: bytes, cname: str, shuffle: int, typesize: int = 4, blocksize: int = 0) -> bytes:
    """Encode a frame of C-Blosc."""
    return bytes(numcodecs.blosc.compress(data, cname.encode(), 5, shuffle, blocksize=blocksize, typesize=typesize))


def single() -> None:
    """Let both packages decode with one thread, without the GIL."""
    blosc.set_nthreads(1)
    blosc.set_releasegil(True)
    numcodecs.blosc.use_threads = False


# -- the same bytes


def measure_equal(data: Any, rounds: int) -> Iterator[Result]:
    """Count the correctly decoded frames, over all inner codecs, shuffles, item and block sizes."""
    single()
    right, total = Counter[str](), 0
    for cname in CNAMES:
        for shuffle in range(3):
            for typesize in TYPESIZES:
                for size, blocksize in ((1, 0), (3000, 0), (70_001, 0), (70_001, 4096)):
                    plain = content(size, size + typesize)
                    frame, total = framed(plain, cname, shuffle, typesize, blocksize), total + 1
                    for name, into in PACKAGES.items():
                        out = np.empty(size + 1, np.uint8)[:size]
                        into(frame, out)
                        right[name] += out.tobytes() == plain
    yield Result("frames that come out right", "", [right["blosc"]], f"numcodecs, of {total}", [right["numcodecs"]], 1)


# -- speed


def measure_speed(data: Any, rounds: int) -> Iterator[Result]:
    """Measure each inner codec and shuffle at three sizes."""
    single()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for label, size in SIZES.items():
            for cname in CNAMES:
                for shuffle, named in enumerate(SHUFFLES):
                    frame, out = framed(content(size), cname, shuffle), np.empty(size, np.uint8)
                    run = functools.partial(in_thread, thread, frame, out)
                    samples = interleaved(
                        3 * rounds, {name: functools.partial(run, into) for name, into in PACKAGES.items()}
                    )
                    yield Result(f"{label} {cname} {named}: blosc", "µs", samples["blosc"], "numcodecs",
                                 samples["numcodecs"])  # fmt: skip


def in_thread(thread: concurrent.futures.Executor, frame: bytes, out: np.ndarray[Any, Any], into: Into) -> float:
    """Return the µs that decoding a frame takes in a worker thread."""
    return thread.submit(timed, into, frame, out).result()


def timed(into: Into, frame: bytes, out: np.ndarray[Any, Any]) -> float:
    """Return the µs that decoding a frame takes."""
    count = max(1, (16 << 20) // (out.nbytes + (128 << 10)))
    began = time.perf_counter()
    for _ in range(count):
        into(frame, out)
    return (time.perf_counter() - began) / count * 1e6


def measure_gil(data: Any, rounds: int) -> Iterator[Result]:
    """Measure how long a thread waits while another one decodes 4 MiB of zstd."""
    single()
    frame, out = framed(content(4 << 20), "zstd", 1), np.empty(4 << 20, np.uint8)
    samples = interleaved(
        rounds, {name: functools.partial(waited, into, frame, out) for name, into in PACKAGES.items()}
    )
    yield Result("longest wait beside it: blosc", "ms", samples["blosc"], "numcodecs", samples["numcodecs"])


def waited(into: Into, frame: bytes, out: np.ndarray[Any, Any]) -> float:
    """Return the 99th percentile, in ms, of an iteration of a loop while another thread decodes."""
    stop = threading.Event()

    def decode() -> None:
        while not stop.is_set():
            into(frame, out)

    worker = threading.Thread(target=decode)
    worker.start()
    gaps, last = [], time.perf_counter()
    until = last + 0.5
    while last < until:
        time.sleep(0)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    stop.set()
    worker.join()
    return float(np.percentile(gaps, 99)) * 1e3


# -- damaged frames


def guarded(size: int) -> tuple[np.ndarray[Any, Any], mmap.mmap]:
    """Return `size` bytes that end at an inaccessible page, and begin less than a page after another one."""
    page = mmap.PAGESIZE
    whole = max(page, -(-size // page) * page)
    area = mmap.mmap(-1, whole + 2 * page)
    memory = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (0, whole + page):
        if libc.mprotect(ctypes.c_void_p(memory.ctypes.data + at), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    return memory[page + whole - size : page + whole], area


def mutant(seed: int) -> tuple[bytes, bytes]:
    """Return random content, and its frame with some bytes of header or body changed, or truncated."""
    rng = random.Random(seed)
    plain = content(rng.choice((100, 3000, 20_000)), seed % 7) if seed % 5 else bytes(5000)
    frame = bytearray(
        framed(plain, rng.choice(CNAMES), rng.randrange(3), rng.choice(TYPESIZES), rng.choice((0, 256, 4096)))
    )
    for _ in range(rng.randint(1, 4)):
        where = rng.random()
        if where < 0.05:
            value = rng.choice((rng.getrandbits(32), rng.randrange(9000)))
            struct.pack_into("<I", frame, rng.choice((4, 8, 12)), value)
        elif where < 0.1:
            frame[rng.randrange(4)] = rng.getrandbits(8)
        elif where < 0.5 and len(frame) > 24:
            struct.pack_into("<I", frame, 16 + 4 * rng.randrange(min(8, (len(frame) - 16) // 4)),
                             rng.choice((rng.getrandbits(32), rng.randrange(9000))))  # fmt: skip
        elif where < 0.95:
            frame[rng.randrange(len(frame))] = rng.getrandbits(8)
        else:
            del frame[rng.randrange(17, len(frame) + 1) :]
            struct.pack_into("<I", frame, 12, len(frame))
    return plain, bytes(frame)


def judged(name: str, checked: bool, seed: int) -> str:
    """Decode one mutant between guard pages; return "right", "wrong" (values of the right size) or "refused"."""
    plain, frame = mutant(seed)
    if len(frame) < 16:
        return "refused"
    size = struct.unpack_from("<I", frame, 4)[0]
    if checked:
        try:
            header = parse_header(frame, len(plain))
        except CodecError:
            return "refused"
        if header.stored or not header.size:
            return "refused"
        frame = frame[: header.length]
    elif size > 64 << 20:
        return "refused"  # no caller would allocate that much
    source, _kept = guarded(len(frame))
    source[:] = np.frombuffer(frame, np.uint8)
    out, _kept_too = guarded(size)
    try:
        PACKAGES[name](memoryview(source), out)
    except (RuntimeError, ValueError, blosc.blosc_extension.error):
        return "refused"
    return "right" if out.tobytes() == plain else "wrong"


def in_child(name: str, checked: bool, first: int, count: int) -> tuple[Counter[str], int]:
    """Judge `count` mutants from `first` on in a child; return the outcomes and the number judged."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        single()
        for seed in range(first, first + count):
            os.write(writer, judged(name, checked, seed)[:2].encode())
        os._exit(0)
    os.close(writer)
    said = b""
    while more := os.read(reader, 1 << 16):
        said += more
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    words = Counter(said[at : at + 2].decode() for at in range(0, len(said), 2))
    judged_number = len(said) // 2
    if status:
        words[f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "failed"] += 1
        judged_number += 1
    return words, judged_number


def measure_fuzz(data: Any, rounds: int) -> Iterator[Result]:
    """Decode damaged frames with both packages, without and with the checks of zarrfs; count children that died."""
    for checked in (False, True):
        for name in PACKAGES:
            words, seed = Counter[str](), 0
            while seed < MUTANTS:
                more, judged_number = in_child(name, checked, seed, min(_BATCH, MUTANTS - seed))
                words += more
                seed += judged_number
            crashes = sum(count for word, count in words.items() if word.startswith(("signal", "failed")))
            note = ", ".join(f"{word} {count}" for word, count in sorted(words.items()))
            what = f"{name}, {'after the checks' if checked else 'unchecked'}: children that died"
            yield Result(what, "", [crashes], "", [], 0 if checked else None, at_most=True, note=note)


MEASURES = {"equal": measure_equal, "speed": measure_speed, "gil": measure_gil, "fuzz": measure_fuzz}
