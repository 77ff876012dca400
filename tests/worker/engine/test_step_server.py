"""A rank behind its socket."""

import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec
import pytest

from tests.patience import PATIENCE
from worker.engine import step_server
from worker.engine.step_server import StartedStep, serve_steps
from worker.pools import PageCounts
from worker.protocol import (
    GENESIS,
    Chunk,
    Plan,
    SamplingParams,
    SequenceStart,
    StepOutput,
    StepReply,
    encode_plan,
)
from worker.testing.fake_rank import FakeRank, fake_continuation
from worker.transport.channel import ChannelClosed, listen, receive, send

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
    thread.join(PATIENCE)
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
    rank.allocate(PageCounts(8))
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


class DeviceRank:
    """Starts steps whose ends the test tells, as a device would."""

    def __init__(self) -> None:
        self.started: SimpleQueue[tuple[bytes, Future[StepReply]]] = SimpleQueue()
        self.asked: SimpleQueue[int] = SimpleQueue()  # steps whose reply is waited for
        self._step = 0

    def start(self, frame: bytes) -> StartedStep:
        if frame == b"wrong":
            raise RuntimeError("no such plan")
        self._step += 1
        step, end = self._step, Future[StepReply]()
        self.started.put((frame, end))

        def reply() -> StepReply:
            self.asked.put(step)
            return end.result(PATIENCE)

        return StartedStep(frame == b"at once", reply)

    def next(self) -> tuple[bytes, Future[StepReply]]:
        return self.started.get(timeout=PATIENCE)


def replied(connection: socket.socket) -> StepReply:
    connection.settimeout(PATIENCE)
    return msgspec.msgpack.decode(receive(connection), type=StepReply)


def answer(step: int) -> StepReply:
    return StepReply(step, StepOutput(step, ()))


def test_a_step_is_started_before_the_one_before_it_has_ended():
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        frame, first = rank.next()
        assert frame == b"one"
        for step in range(2, 6):
            send(connection, b"next")
            frame, second = rank.next()
            assert frame == b"next"
            assert not first.done()
            first.set_result(answer(step - 1))
            assert replied(connection) == answer(step - 1)
            first = second
        first.set_result(answer(5))
        assert replied(connection) == answer(5)
    assert errors == []


def test_a_step_that_is_done_first_is_answered_in_its_turn():
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        send(connection, b"two")
        (_, first), (_, second) = rank.next(), rank.next()
        second.set_result(answer(2))
        first.set_result(answer(1))
        assert [replied(connection).step for _ in range(2)] == [1, 2]
    assert errors == []


def test_a_step_that_waits_for_nothing_is_answered_behind_one_that_does():
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        send(connection, b"at once")
        (_, first), (_, second) = rank.next(), rank.next()
        second.set_result(answer(2))
        first.set_result(answer(1))
        assert [replied(connection).step for _ in range(2)] == [1, 2]
    assert errors == []


def test_steps_that_wait_for_nothing_are_answered_by_the_thread_that_starts_them(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a thread was asked for")

    with served(fake_rank()) as (address, errors), connect(address) as connection:
        monkeypatch.setattr("worker.engine.step_server.threading.Thread", refuse)
        frame, digest = encode_plan(first_plan(), GENESIS)
        assert ask(connection, frame).step == 1
        assert ask(connection, encode_plan(Plan(2, (1,), (), ()), digest)[0]).step == 2
    assert errors == []


@pytest.mark.parametrize("has_started_next", [False, True])
def test_a_step_that_fails_while_it_is_waited_for_is_reported_and_ends_the_service(
    has_started_next,
):
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        _, first = rank.next()
        if has_started_next:
            send(connection, b"two")
            rank.next()
        first.set_exception(RuntimeError("the device is on fire"))
        reply = replied(connection)
        assert (reply.step, reply.error) == (1, "RuntimeError: the device is on fire")
        with pytest.raises((ChannelClosed, ConnectionError)):
            replied(connection)
    assert [str(error) for error in errors] == ["the device is on fire"]


def test_a_step_that_cannot_be_started_is_reported_behind_the_one_that_runs():
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        _, first = rank.next()
        send(connection, b"wrong")
        assert rank.asked.get(timeout=PATIENCE) == 1
        first.set_result(answer(1))
        assert replied(connection) == answer(1)
        reply = replied(connection)
        assert (reply.step, reply.error) == (2, "RuntimeError: no such plan")
    assert [str(error) for error in errors] == ["no such plan"]


def test_of_two_steps_that_fail_the_first_is_reported():
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        send(connection, b"one")
        _, first = rank.next()
        send(connection, b"wrong")
        first.set_exception(RuntimeError("the device is on fire"))
        assert replied(connection).error == "RuntimeError: the device is on fire"
        with pytest.raises((ChannelClosed, ConnectionError)):
            replied(connection)
    assert [str(error) for error in errors] == ["the device is on fire"]


@pytest.mark.parametrize("fails", [False, True])
def test_when_the_scheduler_goes_away_the_step_that_runs_is_waited_for(fails):
    rank = DeviceRank()
    with served(rank) as (address, errors):
        with connect(address) as connection:
            send(connection, b"one")
            _, first = rank.next()
        assert rank.asked.get(timeout=PATIENCE) == 1
        if fails:
            first.set_exception(RuntimeError("the device is on fire"))
        else:
            first.set_result(answer(1))
    assert [str(error) for error in errors] == (["the device is on fire"] if fails else [])


def test_no_more_than_one_step_is_ever_ahead(monkeypatch):
    checked: SimpleQueue[int] = SimpleQueue()
    check = step_server._Replies.check

    def noted(replies: step_server._Replies, step: int) -> None:
        try:
            check(replies, step)
        finally:
            checked.put(step)

    monkeypatch.setattr(step_server._Replies, "check", noted)
    rank = DeviceRank()
    with served(rank) as (address, errors), connect(address) as connection:
        for step in (1, 2, 3):
            send(connection, b"next")
            assert checked.get(timeout=PATIENCE) == step
        for step in (1, 2):
            rank.next()[1].set_result(answer(step))
            assert replied(connection) == answer(step)
    (error,) = errors
    assert str(error) == "step 3 has come when 0 was the last to be answered"
