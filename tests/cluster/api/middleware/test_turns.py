"""Calls that come at once begin one in each turn of the loop, and what runs goes on in between."""

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from cluster.api.middleware.turns import TakeTurns


async def _receive() -> Message:
    raise AssertionError("nobody reads")


async def _send(message: Message) -> None:
    raise AssertionError("nobody answers")


def _noting(begun: list[int]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["number"])

    return app


def _calls(turns: TakeTurns, count: int, kind: str = "http") -> list[asyncio.Task[None]]:
    loop = asyncio.get_running_loop()
    return [
        loop.create_task(turns({"type": kind, "number": number}, _receive, _send))
        for number in range(count)
    ]


async def _turn_of_the_loop() -> None:
    await asyncio.sleep(0)


async def test_each_turn_of_the_loop_begins_one_call_in_order_of_arrival() -> None:
    begun: list[int] = []
    _calls(TakeTurns(_noting(begun)), 5)
    seen = []
    while len(begun) < 5:
        await _turn_of_the_loop()
        seen.append(len(begun))
    assert begun == [0, 1, 2, 3, 4]
    assert all(later - earlier <= 1 for earlier, later in zip([0, *seen], seen, strict=False)), seen


async def test_a_call_that_comes_alone_begins_at_once() -> None:
    begun: list[int] = []
    turns = TakeTurns(_noting(begun))
    for number in range(3):
        call = turns({"type": "http", "number": number}, _receive, _send)
        with_no_turn_of_the_loop(call)
        assert begun[-1] == number
        for _ in range(2):
            await _turn_of_the_loop()


def with_no_turn_of_the_loop(call: Awaitable[None]) -> None:
    """Run a call, which must not wait for anything."""
    steps = call.__await__()
    try:
        next(steps)
    except StopIteration:
        return
    raise AssertionError("it waits")


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_call_that_is_cancelled_while_it_waits_takes_no_turn(cancelled: list[bool]) -> None:
    async def run() -> list[int]:
        begun: list[int] = []
        calls = _calls(TakeTurns(_noting(begun)), 1 + len(cancelled))
        await _turn_of_the_loop()  # the first has begun, the others wait
        for call, is_cancelled in zip(calls[1:], cancelled, strict=True):
            if is_cancelled:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return begun

    left = [number for number, is_cancelled in enumerate(cancelled, 1) if not is_cancelled]
    assert asyncio.run(run()) == [0, *left]


async def test_the_start_of_the_server_waits_for_no_turn() -> None:
    begun: list[int] = []
    _calls(TakeTurns(_noting(begun)), 3, kind="lifespan")
    await _turn_of_the_loop()
    assert begun == [0, 1, 2]
