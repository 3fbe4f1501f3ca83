"""A mount in namespaces of its own, whose DNS server starts only seconds after a read has begun.

Run by test_outages.py with `unshare -mn`: python -m tests.mounts.nameless DIRECTORY SECONDS. Writes a JSON object.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.mounts.mounting import counters_of, log_of, mounted, until
from tests.servers import Faulty

NAME = b"\4data\4test\0"


def answer(server: socket.socket) -> None:
    """Answer questions about NAME with 127.0.0.1, all others with "no such name" (RFC 1035)."""
    while True:
        query, client = server.recvfrom(512)
        end = query.index(b"\0", 12) + 5
        question = query[12:end]
        known = question.startswith(NAME)
        is_a = known and question[-4:-2] == b"\0\1"
        record = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4\x7f\0\0\1" if is_a else b""
        flags = b"\x81\x80" if known else b"\x81\x83"
        server.sendto(query[:2] + flags + b"\0\1\0" + bytes([is_a]) + bytes(4) + question + record, client)


def main(directory: Path, seconds: float) -> dict[str, object]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (directory / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    subprocess.run(["mount", "--bind", directory / "resolv.conf", "/etc/resolv.conf"], check=True)
    web, value = Faulty(), bytes(range(200))
    url = web.put("/f", value).replace("127.0.0.1", "data.test")
    (directory / "refs.json").write_text(json.dumps({"version": 1, "refs": {"v": [url, 0, 200]}}))
    found: list[bytes] = []
    with mounted(directory / "refs.json", directory / "mnt", "prefetch=0B,read_timeout=100s") as root:
        reader = threading.Thread(target=lambda: found.append((root / "v").read_bytes()))
        reader.start()
        until(lambda: counters_of(root)["outages"])
        began = time.monotonic()  # timed from here, as it takes a while until the outage is noticed
        time.sleep(seconds)
        [out] = counters_of(root)["outages"].values()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind(("127.0.0.1", 53))
            threading.Thread(target=answer, args=(server,), daemon=True).start()
            reader.join(60)
            took = time.monotonic() - began
        until(lambda: "answers again" in log_of(root))
        return {"right": found == [value], "seconds": took, "outage": out, "log": log_of(root)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]))))
    sys.stdout.flush()
