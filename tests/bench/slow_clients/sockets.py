"""Which connections a server of this machine has, from the kernel's own table."""

import socket
from pathlib import Path


def num_sockets(port: int, client: str) -> int:
    """Return how many connections a process has on a port with one client's address.

    One that its process has left, while the kernel still sends what lies there, does not count: it
    belongs to nobody any more, as its inode tells.
    """
    # Addresses stand there as the machine has them in memory.
    address = socket.inet_aton(client)[::-1].hex().upper()
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        is_its = words[1].endswith(f":{port:04X}") and words[2].startswith(f"{address}:")
        count += is_its and words[9] != "0"
    return count
