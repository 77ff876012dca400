"""Serves the steps of one rank to one scheduler over a socket.

One frame in, one reply out, in the order of the frames. A frame is read and its step started while
the device may still be at the step before; only one is ever ahead.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Protocol

import msgspec

from worker.protocol import StepReply
from worker.transport.channel import ChannelClosed, receive, send
from worker.transport.hello import Connection, accept


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that is queued on a rank's device, maybe behind another one."""

    is_done: bool  # whether `reply` waits for nothing
    reply: Callable[[], StepReply]  # waits for the step; raises what it failed with


class StepRunner(Protocol):
    """What runs steps: a `Rank`, or a fake of one."""

    def start(self, frame: bytes) -> StartedStep:
        """Queue the plan in a frame on the device."""
        ...


def serve_steps(rank: StepRunner, server: socket.socket, secret: bytes) -> None:
    """Accept one scheduler that knows the secret and run its plans until it goes away.

    A step that fails is reported and raised again: the rank is of no use after it.
    """
    with server:
        connection = accept(server, secret)
    with connection:
        replies = _Replies(connection)
        try:
            _serve(rank, connection, replies)
        finally:
            replies.end()


def _serve(rank: StepRunner, connection: Connection, replies: "_Replies") -> None:
    for step in count(1):
        try:
            frame = receive(connection)
        except (ChannelClosed, ConnectionError):
            return
        replies.check(step)
        try:
            started = rank.start(frame)
        except Exception as error:
            replies.end()
            replies.report(step, error)
            raise
        replies.add(step, started)


class _Replies:
    """Sends the replies to started steps.

    One that waits for a device is waited for by a thread of its own, which others then queue for;
    the rest is sent at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: SimpleQueue[tuple[int, StartedStep] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._last_step = 0  # that was answered
        self._failure: Exception | None = None  # of a step that the thread has waited for

    def check(self, step: int) -> None:
        """Refuse to go on with a step after one that has failed, or too early.

        Raises:
            Exception: what a step before has failed with.
        """
        if self._failure is not None:
            raise self._failure
        last = self._last_step
        assert step <= last + 2, f"step {step} has come when {last} was the last to be answered"

    def add(self, step: int, started: StartedStep) -> None:
        """Answer a step behind those before it; raises what it fails with if it is done already."""
        with self._sending:
            is_next = step == self._last_step + 1
        if is_next and started.is_done:
            self._answer(step, started)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer_all, name="replies", daemon=True)
            self._thread.start()
        self._queue.put((step, started))

    def report(self, step: int, error: Exception) -> None:
        """Say that a step has failed."""
        self._send(step, StepReply(step, error=f"{type(error).__name__}: {error}"))

    def end(self) -> None:
        """Wait until all are sent.

        Raises:
            Exception: what a step has failed with that was waited for.
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def _answer_all(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._answer(*item)
        except Exception as error:  # whatever it is: it is raised again by the thread that serves
            self._failure = error
            with suppress(OSError):  # the scheduler has gone already
                self._connection.shutdown(socket.SHUT_RD)  # wakes that thread, if it receives

    def _answer(self, step: int, started: StartedStep) -> None:
        try:
            reply = started.reply()
        except Exception as error:
            self.report(step, error)
            raise
        self._send(step, reply)

    def _send(self, step: int, reply: StepReply) -> None:
        """Send a reply; a scheduler that has gone away is noticed by the next `receive`."""
        with self._sending:
            self._last_step = step
            with suppress(ConnectionError):
                send(self._connection, msgspec.msgpack.encode(reply))
