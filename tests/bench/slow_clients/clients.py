"""Clients that keep a server waiting: `python -m tests.bench.slow_clients.clients KIND PORT N`.

A process of its own, so that they take no time from the client that is measured. A line is printed
when all have come; after a line of input another one tells in JSON how many were answered what.
"""

import json
import resource
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

PAUSE_AFTER = 100  # connections, for a tenth of a second: the cores are the server's as well
BODY_BYTES = 8 * 1024 * 1024 - 4096
READER_BUFFER = 4096  # bytes that the kernel keeps for one that reads slowly
ADDRESSES = {
    "idle sockets": "127.0.0.2",
    "half-sent heads": "127.0.0.3",
    "half-sent bodies": "127.0.0.4",
    "slow readers": "127.0.0.5",
    "quick readers": "127.0.0.6",
}


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    """Return a POST; `length` is what it says of its body, if not the truth."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def long_stream(number: int) -> bytes:
    """Return a request for a stream of 2 KB a token: twenty others come with each."""
    body = {
        "model": "smollm2",
        "stream": True,
        "max_tokens": 30,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "messages": [{"role": "user", "content": f"Count from {number} on."}],
    }
    return request("/v1/chat/completions", json.dumps(body).encode())


def first_bytes(kind: str, number: int) -> bytes:
    """Return what the client of a number sends."""
    if kind == "idle sockets":
        return b""
    if kind == "half-sent heads":
        return b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"
    if kind == "half-sent bodies":
        half = b'{"prompt": "' + b"x" * (BODY_BYTES // 2)
        return request("/v1/completions", half, BODY_BYTES)
    return long_stream(number)


def opened(kind: str, port: int, number: int) -> list[socket.socket]:
    """Return connections that have sent what they send."""
    clients = []
    for index in range(number):
        if index % PAUSE_AFTER == PAUSE_AFTER - 1:
            time.sleep(0.1)
        client = socket.socket()
        if kind == "slow readers":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READER_BUFFER)
        client.bind((ADDRESSES[kind], 0))
        client.settimeout(60)
        with suppress(ConnectionError):  # it was refused
            client.connect(("127.0.0.1", port))
            client.sendall(first_bytes(kind, index))
        client.setblocking(False)
        clients.append(client)
    return clients


def read(clients: list[socket.socket], num_bytes: int, interval: float) -> None:
    """Read so many bytes of each at intervals, for ever."""
    while True:
        for client in clients:
            with suppress(OSError):
                client.recv(num_bytes)
        time.sleep(interval)


def answers(clients: list[socket.socket]) -> Counter[str]:
    """Return what they find now: a status, the rest of an answer, an end, or nothing."""
    found: Counter[str] = Counter()
    for client in clients:
        try:
            data = client.recv(64)
            is_answer = data.startswith(b"HTTP/")
            found[data.split()[1].decode() if is_answer else "rest" if data else "closed"] += 1
        except BlockingIOError:
            found["nothing"] += 1
        except OSError:
            found["closed"] += 1
    return found


def main(kind: str, port: int, number: int) -> None:
    """Open them, say so, and tell what was answered when asked for it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    clients = opened(kind, port, number)
    if kind.endswith("readers"):
        pace = (1, 1.0) if kind.startswith("slow") else (2**20, 0.1)
        threading.Thread(target=read, args=(clients, *pace), daemon=True).start()
    print("open", flush=True)
    sys.stdin.readline()
    print(json.dumps(answers(clients)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
