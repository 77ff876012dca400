"""What is asked of a running HAProxy through its own socket, without Serve and without Ray."""

import csv
import socket
from collections.abc import Iterator
from pathlib import Path

_TIMEOUT = 2.0  # seconds
_NO_APPLICATION = ("stats", "prometheus", "default_backend")


def refuse_calls(directory: Path) -> None:
    """Let each HAProxy of a server answer new requests with 503; those that run go on.

    Raises:
        OSError: if one does not answer.
    """
    for admin in _sockets(directory):
        for line in _ask(admin, "show servers state").splitlines():
            fields = line.split()
            if len(fields) > 4 and fields[0].isdecimal():
                _ask(admin, f"set server {fields[1]}/{fields[3]} state maint")


def num_in_flight(directory: Path) -> int:
    """Return how many requests have not been answered to their end.

    Raises:
        OSError: if HAProxy does not answer.
    """
    return sum(
        int(row["scur"])
        for row in statistics(directory)
        if row["svname"] == "BACKEND" and row["pxname"] not in _NO_APPLICATION
    )


def statistics(directory: Path) -> Iterator[dict[str, str]]:
    """Yield what each HAProxy of a server counts, by proxy (`pxname`) and server (`svname`).

    Raises:
        OSError: if HAProxy does not answer.
    """
    for admin in _sockets(directory):
        yield from csv.DictReader(_ask(admin, "show stat").removeprefix("# ").splitlines())


def _sockets(directory: Path) -> list[Path]:
    """Return the sockets of all HAProxies of a server; Serve gives each node a folder."""
    return sorted(directory.glob("*/admin.sock"))


def _ask(admin: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT)
        connection.connect(str(admin))
        connection.sendall(f"{command}\n".encode())
        answer = bytearray()
        while part := connection.recv(65536):
            answer += part
    return answer.decode()
