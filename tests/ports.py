"""Ports for servers that a test or a measurement starts."""

import os
import socket
from contextlib import suppress
from itertools import count

# Above those of Ray's workers and of our own servers' HAProxy, below those that the kernel gives to
# whoever asks for any: a port among these may be taken between the question and the server's start.
FIRST, COUNT = 30_000, 2_700
_turns = count(os.getpid() * 61)  # other processes ask for others


def free_port() -> int:
    """Return a port of 127.0.0.1 where nobody listens; it is not returned again soon.

    Raises:
        OSError: if all are taken.
    """
    for turn, _ in zip(_turns, range(COUNT), strict=False):
        port = FIRST + turn % COUNT
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"all of the {COUNT} ports from {FIRST} on are taken")
