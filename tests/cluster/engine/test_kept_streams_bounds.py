"""What schedulers keep is bounded, looked at without taking it, and ended from anywhere."""

import asyncio
from math import inf

import pytest

from cluster.engine import kept_streams
from cluster.engine.kept_streams import KeptCall, KeptStreams
from cluster.errors import Overloaded
from cluster.messages import Claimed, EndKept, Events, Keep, Look, Submit
from cluster.request import BASE, Request, TokenEvent
from tests.cluster.engine.small_engine import (
    RouterEnd,
    World,
    ask_choices,
    expected,
    token_ids,
    until_ready,
    world_with,
)
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

REQUEST = Request("r", BASE, (1, 2, 3), SamplingParams(), max_tokens=5)
END = TokenEvent("r", (7,), finish_reason="length")
READER = object()


def kept(streams: KeptStreams, name: str, record: bytes = b"") -> KeptCall:
    return streams.add(Keep(name, PATIENCE, record), (REQUEST,), READER)


def end(streams: KeptStreams, call: KeptCall) -> None:
    call.events[0].append(END)
    streams.end(call)


async def test_of_too_many_that_have_ended_the_oldest_end_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_ENDED", 2)
    streams = KeptStreams(lambda _: None)
    calls = {name: kept(streams, name) for name in "abcd"}
    for name in "cab":
        end(streams, calls[name])
    assert [name for name in "abcd" if streams.get(name)] == ["a", "b", "d"]
    streams.close()


async def test_of_too_many_bytes_the_oldest_go_first_and_one_too_large_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_ENDED_BYTES", 30_000)
    streams = KeptStreams(lambda _: None)
    for name in "abc":
        end(streams, kept(streams, name, b"x" * 8_000))
    assert [name for name in "abc" if streams.get(name)] == ["b", "c"]
    end(streams, kept(streams, "d", b"x" * 50_000))
    assert not any(streams.get(name) for name in "abcd")
    end(streams, kept(streams, "e", b"x" * 8_000))
    assert streams.get("e") is not None
    streams.close()


async def test_tokens_and_what_is_said_beside_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_streams, "MAX_ENDED_BYTES", 100_000)
    streams = KeptStreams(lambda _: None)
    call = kept(streams, "a")
    top = tuple((token, -1.0) for token in range(20))
    call.events[0] += [TokenEvent("r", (7,), (-1.0,), (top,)) for _ in range(50)]
    end(streams, call)
    assert streams.get("a") is None
    streams.close()


async def test_records_of_what_runs_are_bounded_at_the_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_streams, "MAX_RECORD_BYTES", 100)
    streams = KeptStreams(lambda _: None)
    call = kept(streams, "a", b"x" * 80)
    with pytest.raises(Overloaded):
        streams.check_room(Keep("b", 1.0, b"x" * 30))
    end(streams, call)
    streams.check_room(Keep("b", 1.0, b"x" * 30))
    streams.forget(call)
    streams.forget(call)
    streams.check_room(Keep("b", 1.0, b"x" * 100))


async def test_a_call_that_comes_back_to_its_engine_replaces_what_was_there() -> None:
    dropped: list[KeptCall] = []
    streams = KeptStreams(dropped.append)
    first = kept(streams, "a")
    second = kept(streams, "a")
    assert dropped == [first]
    assert streams.get("a") is second
    streams.forget(first)
    assert streams.get("a") is second
    streams.close()


async def test_the_time_of_a_call_that_has_ended_counts_from_its_end() -> None:
    streams = KeptStreams(lambda _: None)
    call = streams.add(Keep("a", PATIENCE, b"", PATIENCE / 2), (REQUEST,), READER)
    streams.unread(call)
    before = call.timer
    assert before is not None
    end(streams, call)
    assert before.cancelled()
    assert call.timer is not None
    assert call.timer.when() > before.when()
    streams.close()


async def test_what_needs_no_reader_has_no_end_while_it_runs() -> None:
    streams = KeptStreams(lambda _: None)
    call = streams.add(Keep("a", PATIENCE, b"", inf), (REQUEST,), READER)
    streams.unread(call)
    assert call.timer is None
    end(streams, call)
    assert call.timer is not None
    streams.close()


# Over an engine.

CHOICES = [expected(n=60, length=10, seed=seed) for seed in range(2)]


def ask_kept(*names: str, unread_seconds: float | None = None) -> Submit:
    requests = ask_choices(*names, n=60, length=10).requests
    return Submit(requests, Keep("secret", PATIENCE, b"whose", unread_seconds, tells=True))


async def answer(router: RouterEnd, frame: Look | EndKept) -> Claimed:
    router.send(frame)
    while not isinstance(message := await router.receive(), Claimed):
        pass
    return message


async def begun(world: World, submit: Submit) -> RouterEnd:
    router = await world.connect()
    await until_ready(router)
    router.send(submit)
    while not isinstance(message := await router.receive(), Events):
        pass
    names = [request.request_id for request in submit.requests]
    assert [event.request_id for event in message.events] == names
    assert not any(event.token_ids or event.finish_reason for event in message.events)
    return router


async def test_who_only_looks_takes_nothing_from_who_reads() -> None:
    async with world_with() as world:
        first, second = await begun(world, ask_kept("a", "b")), await world.connect()
        seen = await answer(second, Look(1, "secret"))
        assert seen.record == b"whose"
        told = await first.collect("a", "b")
        assert [token_ids(told[name]) for name in ("a", "b")] == CHOICES
        seen = await answer(second, Look(2, "secret"))
        assert [token_ids(list(events)) for events in seen.events] == CHOICES
        assert not (await answer(second, Look(3, "other"))).requests


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_call_that_is_ended_frees_everything_and_tells_its_reader(forgets: bool) -> None:
    async with world_with() as world:
        first = await world.connect()
        await until_ready(first)
        for handle in world.launcher.handles:
            handle.rank.hangs.set()
        first.send(ask_kept("a", "b"))
        second = await world.connect()
        while not (await answer(second, Look(1, "secret"))).requests:
            pass
        ended = await answer(second, EndKept(1, "secret", forgets))
        assert [events[-1].finish_reason for events in ended.events] == ["abort", "abort"]
        told = await first.collect("a", "b")
        assert {events[-1].finish_reason for events in told.values()} == {"abort"}
        assert world.engine._dispatcher.num_streams == 0
        assert bool((await answer(second, Look(2, "secret"))).requests) != forgets
        for handle in world.launcher.handles:
            handle.rank.hangs.clear()
            handle.rank.freed.set()
        async with asyncio.timeout(PATIENCE):
            while (stats := (await second.status()).scheduler).num_running:
                await asyncio.sleep(0.01)
        assert stats.held_pages == 0


async def test_a_call_that_needs_no_reader_goes_on_without_its_router() -> None:
    async with world_with() as world:
        first = await begun(world, ask_kept("a", "b", unread_seconds=inf))
        second = await world.connect()
        first.close()
        async with asyncio.timeout(PATIENCE):
            while (await second.status()).scheduler.num_running:
                await asyncio.sleep(0.01)
        seen = await answer(second, Look(1, "secret"))
        assert [token_ids(list(events)) for events in seen.events] == CHOICES
