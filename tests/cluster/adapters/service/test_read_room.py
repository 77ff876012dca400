"""The bytes of weights that are in memory while adapters are read."""

import threading
from collections.abc import Callable

from cluster.adapters.service.read_room import ReadRoom
from tests.patience import PATIENCE


class Reader:
    """A thread that reads an adapter of some size, and ends when it is told to."""

    def __init__(self, room: ReadRoom, num_bytes: int) -> None:
        self.has_room = threading.Event()
        self._may_end = threading.Event()
        self._room, self._num_bytes = room, num_bytes
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._room.entered() as take:
            take(self._num_bytes)
            self.has_room.set()
            assert self._may_end.wait(PATIENCE)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(PATIENCE)


def waits(room: ReadRoom, count: int) -> Callable[[], bool]:
    return lambda: len(room._waiting) == count


def until(is_met: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE * 1000)):
        if is_met():
            return
        pause.wait(0.001)
    raise AssertionError("it has not come to that")


def test_readers_wait_in_order_until_there_is_room() -> None:
    room = ReadRoom(100)
    first, second = Reader(room, 60), Reader(room, 40)
    assert first.has_room.wait(PATIENCE) and second.has_room.wait(PATIENCE)
    third = Reader(room, 70)
    until(waits(room, 1))
    fourth = Reader(room, 1)
    until(waits(room, 2))
    second.end()
    assert not third.has_room.is_set() and not fourth.has_room.is_set()
    first.end()
    assert third.has_room.wait(PATIENCE) and fourth.has_room.wait(PATIENCE)
    third.end()
    fourth.end()
    assert room.num_held == 0 and room.most_held == 100


def test_one_that_is_larger_than_the_room_is_read_alone() -> None:
    room = ReadRoom(100)
    first = Reader(room, 1)
    assert first.has_room.wait(PATIENCE)
    large = Reader(room, 1000)
    until(waits(room, 1))
    first.end()
    assert large.has_room.wait(PATIENCE)
    last = Reader(room, 1)
    until(waits(room, 1))
    large.end()
    assert last.has_room.wait(PATIENCE)
    last.end()
    assert room.num_held == 0


def test_a_reader_that_asks_for_nothing_holds_nothing() -> None:
    room = ReadRoom(100)
    with room.entered():
        assert room.num_held == 0
    assert room.num_held == 0 and not room._waiting
