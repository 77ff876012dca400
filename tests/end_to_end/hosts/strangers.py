"""What a stranger on the network hears from the sockets of a host."""

import re
import socket
import ssl
from dataclasses import dataclass

from tests.end_to_end.hosts.host import Host

_LISTENING = re.compile(r"(\S+):(\d+)\s+\S+(?:\s+users:\(\(\"([^\"]*)\",pid=(\d+))?")
_ALERT = 21  # of TLS: what is said to who speaks no TLS, and no more
_PATIENCE = 3.0  # seconds that a socket may take to answer


@dataclass(frozen=True)
class Listener:
    """A socket that listens beyond its own host, and whose it is."""

    host: str
    address: str
    port: int
    program: str


def listeners(host: Host) -> list[Listener]:
    """Return the sockets of a host that others can reach."""
    found = []
    for line in host.run("ss", "-ltnpH").splitlines():
        match = _LISTENING.search(line.split(None, 3)[3])
        assert match is not None, line
        address, port, name, pid = match.groups()
        if address.startswith(("127.", "[::1]")):
            continue
        program = name or "?"
        if pid is not None:
            words = host.run("sh", "-c", f"tr '\\0' ' ' < /proc/{pid}/cmdline || true").strip()
            program = words or program
        found.append(Listener(host.name, host.address, int(port), program))
    return found


def answer_to_plain_words(listener: Listener) -> bytes:
    """Return what is said to who speaks HTTP, without what TLS says to who does not speak it."""
    try:
        with socket.create_connection((listener.address, listener.port), _PATIENCE) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            heard = connection.recv(4096)
    except OSError:
        return b""
    return b"" if heard[:1] == bytes([_ALERT]) and len(heard) == 7 else heard


def answer_without_a_certificate(listener: Listener) -> bytes:
    """Return what is said, behind TLS, to who has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        raw = socket.create_connection((listener.address, listener.port), _PATIENCE)
        with raw, context.wrap_socket(raw) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return connection.recv(4096)
    except OSError:
        return b""
