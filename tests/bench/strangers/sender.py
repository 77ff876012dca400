"""`python -m tests.bench.strangers.sender URL FILE`: sends what a file lists, all at once.

A process of its own: to send megabytes must not delay who watches the streams. Nor should it take
the cores of the ranks, as strangers are on other machines: it has read everything before it says so
and waits for a line of its input, and it is niced. Each line of the file is the JSON of a path and
of the file of a body.
"""

import http.client
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

PATIENCE = 300.0  # seconds
READY = "ready"


def send(host: str, path: str, body: bytes) -> tuple[str, float]:
    """Return what the answer was, and after how many seconds."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=PATIENCE)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        told = "" if reply.status == 200 else json.loads(text)["error"]["message"]
        answer = f"{reply.status} {told}".strip()
    except (OSError, http.client.HTTPException) as error:
        answer = f"cut: {type(error).__name__}"
    finally:
        connection.close()
    return answer, time.perf_counter() - began


def main(url: str, listed: Path) -> None:
    """Send all when told to, and tell how often each answer came and how long the slowest took."""
    os.nice(19)
    host = urlsplit(url).netloc
    calls = [json.loads(line) for line in listed.read_text().splitlines()]
    contents = {file: Path(file).read_bytes() for _, file in calls}
    print(READY, flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = list(threads.map(lambda call: send(host, call[0], contents[call[1]]), calls))
    counts = Counter(answer for answer, _ in answers)
    print(json.dumps({"answers": counts, "seconds": max(seconds for _, seconds in answers)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
