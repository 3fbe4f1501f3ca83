"""Two daemons that share a cache directory through two NFS mounts; test_nfs.py runs this in a kernel with NFS.

    nfs_guest.py PROGRAM DIRECTORY NFS NFS      print a JSON object: the values read wrongly, and the requests sent
"""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

VALUES, SIZE, APART = 48, 200_000, 262_144
DATA = random.Random(1).randbytes(VALUES * APART)
counts: Counter[str] = Counter()


class Handler(http.server.BaseHTTPRequestHandler):
    """A handler of range requests for DATA that delays each response."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the requested range."""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        counts[self.headers["Range"]] += 1
        time.sleep(0.05)
        self.send_response(206)
        self.send_header("ETag", '"one"')
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(DATA)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(DATA[first : last + 1])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def wrong(root: Path) -> int:
    """Read all values with eight threads; return the number of wrong ones."""

    def is_wrong(number: int) -> bool:
        return (root / f"v{number}").read_bytes() != DATA[number * APART : number * APART + SIZE]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return sum(pool.map(is_wrong, range(VALUES)))


def main() -> None:
    program, directory, places = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/data"
    source = directory / "refs.json"
    source.write_text(json.dumps({"version": 1, "refs": {f"v{n}": [url, n * APART, SIZE] for n in range(VALUES)}}))

    def mounted(name: str, place: str) -> Path:
        (root := directory / name).mkdir()
        options = f"cache_dir={place}/blocks,prefetch=0B"
        subprocess.run([program, "mount", source, root, "-o", options], check=True)
        return root

    roots = [mounted(str(number), place) for number, place in enumerate(places)]
    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        found = list(pool.map(wrong, roots))
    for root in roots:
        subprocess.run([program, "umount", root], check=True)
    first = counts.total()
    again = mounted("again", places[0])
    found.append(wrong(again))
    subprocess.run([program, "umount", again], check=True)
    print(json.dumps({"values": VALUES, "wrong": found, "requests": first, "again": counts.total() - first}))


if __name__ == "__main__":
    main()
