"""Serves the steps of one rank to one scheduler over a socket.

Owns the order: one frame in, one reply out. Knows nothing of what a plan says.
"""

import socket
from typing import Protocol

import msgspec

from worker.channel import ChannelClosed, accept, receive, send
from worker.protocol import StepReply


class StepRunner(Protocol):
    """What runs a step: a `Rank`, or a fake of one."""

    def step(self, frame: bytes) -> StepReply:
        """Run the plan in a frame."""
        ...


def serve_steps(rank: StepRunner, server: socket.socket, secret: bytes) -> None:
    """Accept one scheduler that knows the secret and run its plans until it goes away.

    A step that fails is reported and raised again: the rank is of no use after it.
    """
    with server:
        connection = accept(server, secret)
    step = 0
    with connection:
        while True:
            step += 1
            try:
                frame = receive(connection)
            except (ChannelClosed, ConnectionError):
                return
            try:
                reply = rank.step(frame)
            except Exception as error:
                _reply(connection, StepReply(step, error=f"{type(error).__name__}: {error}"))
                raise
            _reply(connection, reply)


def _reply(connection: socket.socket, reply: StepReply) -> None:
    """Send a reply; a scheduler that has gone away is noticed by the next `receive`."""
    try:
        send(connection, msgspec.msgpack.encode(reply))
    except ConnectionError:
        return
