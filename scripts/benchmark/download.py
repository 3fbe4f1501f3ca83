"""Download files in parallel, as a short script would: URL LIST CONNECTIONS DIRECTORY. Nothing is synced."""

from __future__ import annotations

import http.client
import os
import queue
import sys
import threading
import urllib.parse


def main() -> None:
    url, listed, connections, directory = sys.argv[1:]
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    failures: list[str] = []
    with open(listed) as file:
        names = file.read().split("\n")
    for name in names:
        os.makedirs(os.path.join(directory, os.path.dirname(name)), exist_ok=True)
        work.put(name)

    def download() -> None:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
        while True:
            try:
                name = work.get_nowait()
            except queue.Empty:
                return
            connection.request("GET", f"/{name}")
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                failures.append(f"{name}: status {response.status}")
            with open(os.path.join(directory, name), "wb") as file:
                file.write(data)

    threads = [threading.Thread(target=download) for _ in range(int(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(failures[0])


if __name__ == "__main__":
    main()
