"""A rank behind its socket."""

import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest

from worker.channel import ChannelClosed, listen, receive, send
from worker.fake_rank import FakeRank, fake_continuation
from worker.protocol import (
    GENESIS,
    Chunk,
    Plan,
    SamplingParams,
    SequenceStart,
    StepReply,
    encode_plan,
)
from worker.step_server import serve_steps

SECRET = b"open sesame"


@contextmanager
def served(rank):
    """Serve a rank in a thread; yields its address and the list of what ended the thread."""
    server = listen("127.0.0.1")
    errors: list[Exception] = []

    def run() -> None:
        try:
            serve_steps(rank, server, SECRET)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield server.getsockname(), errors
    thread.join(timeout=20)
    assert not thread.is_alive()


def connect(address, secret=SECRET) -> socket.socket:
    connection = socket.create_connection(address)
    send(connection, secret)
    return connection


def ask(connection: socket.socket, frame: bytes) -> StepReply:
    send(connection, frame)
    return msgspec.msgpack.decode(receive(connection), type=StepReply)


def fake_rank() -> FakeRank:
    rank = FakeRank(page_size=4)
    rank.allocate(8)
    return rank


def first_plan() -> Plan:
    start = SequenceStart(1, None, SamplingParams(), 3, (), 0, ())
    return Plan(1, (), (start,), (Chunk(1, 0, (5, 6, 7), (2,), True),))


def test_plans_are_answered_until_the_scheduler_goes_away():
    with served(fake_rank()) as (address, errors), connect(address) as connection:
        frame, digest = encode_plan(first_plan(), GENESIS)
        reply = ask(connection, frame)
        assert reply.step == 1
        assert reply.output.tokens[0].token_id == fake_continuation(None, (5, 6, 7), 1)[0]
        frame, _ = encode_plan(Plan(2, (1,), (), ()), digest)
        assert ask(connection, frame).output.tokens == ()
    assert errors == []


def test_a_stranger_is_dropped_and_the_scheduler_still_let_in():
    with served(fake_rank()) as (address, _):
        with connect(address, b"guess") as stranger, pytest.raises((ChannelClosed, OSError)):
            receive(stranger)
        with connect(address) as connection:
            assert ask(connection, encode_plan(first_plan(), GENESIS)[0]).step == 1


def test_only_one_scheduler_is_served():
    with served(fake_rank()) as (address, _), connect(address) as connection:
        assert ask(connection, encode_plan(first_plan(), GENESIS)[0]).step == 1
        with pytest.raises(OSError), connect(address) as second:
            receive(second)


def test_a_failing_step_is_reported_and_ends_the_service():
    with served(fake_rank()) as (address, errors), connect(address) as connection:
        frame, _ = encode_plan(first_plan(), b"x" * 32)
        reply = ask(connection, frame)
        assert reply.output is None
        assert reply.error.startswith("PlanMismatch: plan of step 1 refused")
        with pytest.raises(ChannelClosed):
            receive(connection)
    assert [type(error).__name__ for error in errors] == ["PlanMismatch"]
