"""Which ports of this machine the HAProxy and the routers of one server may take."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

# Where neither Ray nor the kernel gives ports away.
FIRST_PORT, BLOCK_PORTS, NUM_BLOCKS = 20_000, 200, 50


@contextmanager
def claimed_ports(number: int) -> Iterator[range]:
    """Keep a block of ports from all other servers for as long as the context lasts.

    Else all servers of a machine would give their routers the same ports, and the HAProxy of one
    would reach another's router where its own has ended. The claim is a socket with an abstract
    name: it is the network's, as ports are, and gone with the process and its forks.

    Args:
        number: of the block that is tried first; servers that differ in it rarely meet.

    Raises:
        OSError: if all blocks are claimed.
    """
    for block in range(number, number + NUM_BLOCKS):
        first = FIRST_PORT + block % NUM_BLOCKS * BLOCK_PORTS
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0topwork-ports-{first}")
            except OSError:
                continue
            yield range(first, first + BLOCK_PORTS)
            return
    raise OSError(f"{NUM_BLOCKS} servers have all ports from {FIRST_PORT} on")


def free_ports(count: int, among: Sequence[int]) -> list[int]:
    """Return the first ports of this machine that nobody listens on.

    Raises:
        OSError: if there are too few of them.
    """
    found: list[int] = []
    for port in among:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"of the ports from {among[0]} to {among[-1]} all are taken")
