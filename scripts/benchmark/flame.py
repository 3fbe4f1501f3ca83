"""Record a profile of the daemon while chunks are read over https, and draw it as a flame graph: scripts/draw-profile.

    flame.py PYSPY PICTURE

The width of a frame is its share of the daemon's CPU time. Idle threads are left out, and so are the frames of C
libraries, except those that _ENDS names.
"""

from __future__ import annotations

import html
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import remote
import remote_peers
from remote_data import HTTPS, Tree

CHUNKS, READERS, RATE = 600, 32, 500  # RATE: samples a second
TITLE = f"CPU time of the daemon: {CHUNKS} random chunks of 512 KiB over https, {READERS} readers"

WIDTH, ROW, LEAST, LETTER = 1200, 18, 3.0, 6.3  # pixels; LEAST: the minimum width of a frame
_IDLE = re.compile(r"epoll_wait|lock_PyThread_acquire")
# innermost frames: (pattern of the stacks that have one, name, colour)
_ENDS = (
    (r"\bwritev \(", "write to /dev/fuse: the kernel copies to the reader", "#e4a04a"),
    (r"\bdo_handshake\b", "TLS handshake", "#c58fd0"),
    (r"SSL_read_ex", "OpenSSL: receive and decrypt", "#c58fd0"),
    (r"SSL_write_ex|SSLSocket_write", "OpenSSL: send", "#c58fd0"),
    (r"fuse_session_receive_buf|\bread \(libc", "read from /dev/fuse", "#e4a04a"),
)
_ROOMS = {"net": "#7fb6e6", "cache": "#8fcf9b", "store": "#b7d37a", "fuse": "#f0d060", "prefetch": "#9bd3c7"}
_FRAME = re.compile(r"(?P<name>.+) \((?P<file>[^():]+)(?::\d+)?\)")
_PYFUSE = "pyfuse3"
Node = dict[str, "tuple[Counter[str], Node]"]


def frames(stack: str) -> list[tuple[str, str]]:
    """Return the frames to draw for a stack, outermost first: (name, colour)."""
    found: list[tuple[str, str]] = []
    for text in stack.split(";"):
        match = _FRAME.fullmatch(text)
        if match is None:
            continue
        name, file = match["name"].replace("<locals>.", ""), match["file"]
        room = re.match(r"zarrfs/(\w+)/", file)
        if room is not None and room[1] not in ("cli", "daemon", "concurrency"):
            found.append((f"{name} ({file.removeprefix('zarrfs/')})", _ROOMS.get(room[1], "#d8d8d8")))
        elif "unrolled_run" in name:
            found = [("trio's loop", "#d8d8d8")]
        elif re.search(r"pyfuse3|\.px[id]", file) and found and found[-1][0] != _PYFUSE:
            found.append((_PYFUSE, "#f7ecc0"))
    for pattern, name, colour in _ENDS:
        if re.search(pattern, stack):
            found.append((name, colour))
            break
    return found or [("Python", "#d8d8d8")]


def add(root: Node, stack: list[tuple[str, str]], count: int) -> None:
    """Add the samples of a stack to the tree of frames."""
    at = root
    for name, colour in stack:
        counts, below = at.setdefault(name, (Counter(), {}))
        counts[colour] += count
        at = below


def drawn(at: Node, left: float, depth: int, scale: float, out: list[tuple[float, float, int, str, str]]) -> None:
    """Append the layout of the frames to `out`: (left, width, depth, name, colour)."""
    for name, (counts, below) in sorted(at.items(), key=lambda item: -item[1][0].total()):
        width = counts.total() * scale
        if width >= LEAST:
            out.append((left, width, depth, name, next(iter(counts))))
            drawn(below, left, depth + 1, scale, out)
        left += width


def record(program: str, directory: Path) -> list[str]:
    """Record a profile; return lines of a stack, whose frames are separated by ";", and the number of its samples."""
    tree = Tree(directory, 1 << 20)
    profile = directory / "profile"
    try:
        tree.start()
        with remote_peers.zarrfs()(tree, HTTPS) as place:
            command = [program, "record", "--pid", str(place.pid), "--output", profile, "--format", "raw",
                       "--native", "--rate", str(RATE)]  # fmt: skip
            spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            time.sleep(2)  # until py-spy has read the symbols
            remote_peers.read(tree, place, remote.chunks(CHUNKS, READERS))
            spy.send_signal(signal.SIGINT)
            said = spy.communicate()[1]
    finally:
        tree.stop()
    if not profile.exists():
        sys.exit(f"draw-profile: py-spy: {said.strip()}")
    return profile.read_text().splitlines()


def draw(lines: list[str]) -> str:
    """Return the SVG of a profile."""
    root: Node = {}
    total = 0
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if not _IDLE.search(stack):
            add(root, frames(stack), int(count))
            total += int(count)
    out: list[tuple[float, float, int, str, str]] = []
    drawn(root, 0, 0, WIDTH / total, out)
    height = (max(depth for _, _, depth, _, _ in out) + 1) * ROW + 30
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="16" font-size="13">{html.escape(TITLE)}</text>',
    ]
    for left, width, depth, name, colour in out:
        share = f"{name}: {width / WIDTH:.1%}"
        text = share if len(share) * LETTER < width else name
        text = text if len(text) * LETTER < width else f"{text[: int(width / LETTER) - 1]}…"
        top = 26 + depth * ROW
        shown = f'<text x="{left + 3:.1f}" y="{top + 13}">{html.escape(text)}</text>' if width > 5 * LETTER else ""
        svg.append(
            f'<g><title>{html.escape(share)}</title><rect x="{left:.1f}" y="{top}" width="{max(1, width - 0.7):.1f}" '
            f'height="{ROW - 1}" fill="{colour}"/>{shown}</g>'
        )
    return "\n".join([*svg, "</svg>", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="zarrfs-profile-") as made:
        found = record(sys.argv[1], Path(made))
    Path(sys.argv[2]).write_text(draw(found))
