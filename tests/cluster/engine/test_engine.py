"""The engine over real sockets and fake ranks: serving, losing ranks, following KV events."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from cluster.engine.recording import RecordingConfig
from cluster.messages import (
    Abort,
    Events,
    FollowKvEvents,
    KvEvents,
    KvEventsTaken,
    PrefixCacheReset,
    ResetPrefixCache,
    StatusCall,
    UnfollowKvEvents,
    Unload,
    Unloaded,
    encode,
)
from cluster.scheduler.replay.replayer import Replay
from cluster.scheduler.stats import CacheReset
from tests.cluster.engine.small_engine import (
    RouterEnd,
    ThreadHandle,
    ask,
    ask_choices,
    expected,
    token_ids,
    until_ready,
    world_with,
)
from tests.cluster.kv_mirror import Mirror
from tests.cluster.scheduler.random_life import read_records
from tests.patience import PATIENCE
from worker.protocol import RankInfo
from worker.transport.channel import Channel, ChannelClosed


async def until_away(router: RouterEnd) -> None:
    """Wait until the loss of the ranks has been noticed."""
    async with asyncio.timeout(PATIENCE):
        while (await router.status()).ready:
            await asyncio.sleep(0)


async def test_requests_of_two_routers_get_their_own_tokens() -> None:
    async with world_with("cafe") as world:
        one, two = await world.connect(), await world.connect()
        status = await until_ready(one)
        # the smallest budgets of both ranks
        assert (status.scheduler.total_pages, status.scheduler.total_host_pages) == (64, 8)
        one.send(ask("same-id"))
        two.send(ask("same-id", "cafe"))
        two.send(ask("long", n=40))
        assert token_ids((await one.collect("same-id"))["same-id"]) == expected()
        events = await two.collect("same-id", "long")
        assert token_ids(events["same-id"]) == expected("cafe")
        assert token_ids(events["long"]) == expected(n=40)


async def test_streams_go_on_when_a_rank_fails_with_the_tokens_they_would_have_had() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("a", n=40))
        router.send(ask("b", "cafe", n=40))
        router.send(ask_choices("c", "d", n=30, length=10))
        await router.receive()
        world.launcher.handles[1].rank.fails = True
        events = await router.collect("a", "b", "c", "d")
        assert token_ids(events["a"]) == expected(n=40)
        assert token_ids(events["b"]) == expected("cafe", n=40)
        for seed, name in enumerate("cd"):
            assert token_ids(events[name]) == expected(n=30, length=10, seed=seed)
        status = await until_ready(router)
        assert (world.launcher.launches, status.engine.restarts) == (2, 1)
        assert status.histograms["stream_pause_seconds"].number >= 1


async def test_a_rank_that_hangs_is_found_by_the_step_timeout() -> None:
    async with world_with(step_timeout=1.0) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[0].rank.hangs.set()
        router.send(ask("a"))
        assert token_ids((await router.collect("a"))["a"]) == expected()
        status = await router.status()
        assert status.failures["step_timeout"] == 1


async def test_requests_that_come_while_the_ranks_are_away_wait_for_them() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.gate.clear()
        world.launcher.handles[1].rank.fails = True
        router.send(ask("a"))
        await until_away(router)
        for name in "bcd":
            router.send(ask(name))
        router.send(Abort("c"))
        router.send(ask("e"))
        router.send(ask("f"))  # max_waiting is 4, and a waits as well
        events = await router.collect("f")
        assert [event.error.name for event in events["f"] if event.error] == ["Overloaded"]
        world.launcher.gate.set()
        events = await router.collect("a", "b", "d", "e")
        assert {token_ids(of_one) for of_one in events.values()} == {expected()}


async def test_streams_wait_no_longer_than_the_recovery_may_take() -> None:
    async with world_with("cafe", recovery_timeout=0.2) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.gate.clear()
        world.launcher.handles[1].rank.fails = True
        router.send(ask("a"))
        await until_away(router)
        router.send(Unload(3, "cafe"))
        error = (await router.collect("a"))["a"][-1].error
        assert error is not None
        assert (error.name, error.retry_after is not None) == ("Unavailable", True)
        assert await router.receive() == Unloaded(3, 0, ())
        router.send(ask("b"))
        error = (await router.collect("b"))["b"][-1].error
        assert error is not None and error.name == "Unavailable"
        world.launcher.gate.set()
        await until_ready(router)
        router.send(ask("c"))
        assert token_ids((await router.collect("c"))["c"]) == expected()


async def test_an_unload_that_the_ranks_are_lost_in_waits_for_the_streams_that_go_on() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("a", "cafe", n=60))
        await router.receive()
        router.send(Unload(5, "cafe"))
        world.launcher.handles[0].rank.fails = True
        assert token_ids((await router.collect("a"))["a"]) == expected("cafe", n=60)
        answer = await router.receive()
        assert isinstance(answer, Unloaded) and answer.freed_slots


async def test_a_request_that_kills_its_ranks_again_and_again_ends_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.poison(13)
        router.send(ask("a", n=50))
        await router.receive()
        router.send(ask("killer", length=13))
        router.send(ask("b", n=50))
        events = await router.collect("a", "killer", "b")
        error = events["killer"][-1].error
        assert error is not None and error.name == "Internal"
        assert token_ids(events["a"]) == expected(n=50)
        assert token_ids(events["b"]) == expected(n=50)
        assert world.launcher.launches == 4  # the first, and after each of three deaths
    assert [r.message for r in caplog.records if "is ended" in r.message] == [
        f"request killer is ended: {error.message}"
    ]


async def test_requests_for_an_adapter_whose_load_kills_a_rank_end_and_no_others() -> None:
    async with world_with("deadly") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("a", n=50))
        await router.receive()
        router.send(ask("b", "deadly"))
        router.send(ask("c", "deadly"))
        events = await router.collect("a", "b", "c")
        assert token_ids(events["a"]) == expected(n=50)
        for name in "bc":
            assert [e.error.name for e in events[name] if e.error] == ["Internal"]


async def test_closing_leaves_no_task_behind_idle_or_in_a_step() -> None:
    for hangs in (False, True):
        before = asyncio.all_tasks()
        async with world_with() as world:
            router = await world.connect()
            await until_ready(router)
            if hangs:
                world.launcher.handles[0].rank.hangs.set()
                router.send(ask("a"))
                async with asyncio.timeout(PATIENCE):
                    while not (await router.status()).scheduler.num_running:
                        await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "a task is left"


async def test_requests_while_the_ranks_start_are_refused_at_once() -> None:
    async with world_with(open_gate=False) as world:
        router = await world.connect()
        router.send(ask("early"))
        error = (await router.collect("early"))["early"][-1].error
        assert error is not None
        assert (error.name, error.message) == (
            "Unavailable",
            "the ranks are down and will be back: the ranks are starting",
        )
        world.launcher.gate.set()
        await until_ready(router)
        router.send(ask("late"))
        assert token_ids((await router.collect("late"))["late"]) == expected()


async def test_ranks_that_do_not_start_in_time_are_launched_again() -> None:
    async with world_with(start_timeout=0.5, open_gate=False) as world:
        router = await world.connect()
        async with asyncio.timeout(PATIENCE):
            while "did not start in 0.5 s" not in (await router.status()).reason:
                await asyncio.sleep(0.01)
        world.launcher.gate.set()
        status = await until_ready(router)
    assert status.failures["start"] >= 1


async def test_a_router_that_leaves_takes_its_requests_along() -> None:
    async with world_with() as world:
        stays, leaves = await world.connect(), await world.connect()
        await until_ready(stays)
        leaves.send(ask("x", n=100))
        await leaves.receive()
        leaves.close()
        async with asyncio.timeout(PATIENCE):
            while (status := await stays.status()).scheduler.num_running > 0:
                await asyncio.sleep(0.01)
        stats = status.scheduler
        assert stats.held_pages == 0
        assert stats.free_pages + stats.cached_pages == stats.total_pages


async def test_an_aborted_request_gets_no_more_events_and_frees_its_pages() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", n=100))
        await router.receive()
        router.send(Abort("x"))
        router.send(ask("y", n=3))
        seen = set()
        while True:
            message = await router.receive()
            if isinstance(message, Events):
                seen |= {e.request_id for e in message.events if e.finish_reason is not None}
            if seen:
                break
        assert seen == {"y"}
        assert (await router.status()).scheduler.held_pages == 0


async def test_too_many_waiting_requests_are_refused_as_overload() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        names = [str(i) for i in range(40)]
        for name in names:
            router.send(ask(name, n=30))
        events = await router.collect(*names)
        errors = [e.error.name for events in events.values() for e in events if e.error]
        assert errors and set(errors) == {"Overloaded"}


async def test_choices_get_what_single_requests_with_their_seeds_get() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask_choices("a", "b", "c", length=10))
        events = await router.collect("a", "b", "c")
        for seed, request_id in enumerate(("a", "b", "c")):
            assert token_ids(events[request_id]) == expected(length=10, seed=seed)
        status = await router.status()
        counters = status.scheduler.counters
        assert (counters.forked_sequences, counters.prompt_tokens) == (2, 30)
        assert status.scheduler.held_pages == 0


async def test_an_aborted_choice_leaves_the_others_running() -> None:
    async with world_with() as world:
        for gone in ("a", "b"):  # the one that computes the prompt, and one that waits for it
            router = await world.connect()
            await until_ready(router)
            router.send(ask_choices("a", "b", "c"))
            router.send(Abort(gone))
            kept = [name for name in ("a", "b", "c") if name != gone]
            events = await router.collect(*kept)
            for name in kept:
                assert token_ids(events[name]) == expected(seed="abc".index(name))
        assert (await router.status()).scheduler.held_pages == 0


async def test_more_choices_than_the_queue_could_ever_hold_are_all_refused() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask_choices("a", "b", "c", "d", "e"))  # max_waiting is 4
        answers = await router.collect("a", "b", "c", "d", "e")
        for events in answers.values():
            assert [event.error.name for event in events if event.error] == ["InvalidRequest"]
            assert token_ids(events) == ()
        router.send(ask_choices("a", "b", "c", "d"))
        events = await router.collect("a", "b", "c", "d")
        assert token_ids(events["d"]) == expected(seed=3)


async def test_choices_while_the_ranks_start_are_each_refused() -> None:
    async with world_with(open_gate=False) as world:
        router = await world.connect()
        router.send(ask_choices("a", "b"))
        answers = await router.collect("a", "b")
        for events in answers.values():
            assert [event.error.name for event in events if event.error] == ["Unavailable"]


async def test_a_request_that_takes_longer_than_it_may_ends_with_an_error() -> None:
    async with world_with(request_timeout=0.2) as world:
        router = await world.connect()
        await until_ready(router)
        hanging = world.launcher.handles[0].rank
        hanging.hangs.set()
        router.send(ask_choices("a", "b"))
        answers = await router.collect("a", "b")
        for events in answers.values():
            assert [event.error.name for event in events if event.error] == ["DeadlineExceeded"]
        hanging.hangs.clear()
        hanging.freed.set()
        async with asyncio.timeout(PATIENCE):
            while (stats := (await router.status()).scheduler).num_running + stats.num_waiting > 0:
                await asyncio.sleep(0.01)
        assert stats.held_pages == 0


async def test_a_connection_without_the_secret_is_closed() -> None:
    async with world_with() as world:
        address = (world.address.host, world.address.port)
        stranger = await Channel.connect(address, b"x" * 32)
        stranger.send(encode(StatusCall(1)))
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()


async def test_a_connection_that_has_not_said_the_secret_yet_is_closed_with_the_server() -> None:
    async with world_with() as world:
        reader, writer = await asyncio.open_connection(world.address.host, world.address.port)
        await until_ready(await world.connect())
    async with asyncio.timeout(PATIENCE):
        assert await reader.read() == b""
    writer.close()


async def read_kv_events(router: RouterEnd, mirror: Mirror, count: int) -> None:
    """Read until a mirror holds so many blocks."""
    async with asyncio.timeout(PATIENCE):
        while len(mirror.blocks) != count:
            message = await router.receive()
            if isinstance(message, KvEvents):
                mirror.read_all(message.batch.events)
                router.send(KvEventsTaken(message.call_id))


async def test_a_router_that_follows_hears_of_pages_unloads_and_lost_ranks() -> None:
    async with world_with("cafe") as world:
        router, early, late = await world.connect(), Mirror(), Mirror()
        router.send(FollowKvEvents(1))
        await until_ready(router)
        router.send(ask("a", "cafe", length=17))
        await read_kv_events(router, early, 5)  # pages of 4, of a prompt of 17 and 6 tokens more
        assert {adapter for _, adapter, *_ in early.blocks.values()} == {"cafe"}
        other = await world.connect()
        other.send(FollowKvEvents(7))
        await read_kv_events(other, late, 5)
        assert late.blocks == early.blocks
        other.send(UnfollowKvEvents(7))
        router.send(ask("b", length=9))
        await read_kv_events(router, early, 8)
        router.send(Unload(2, "cafe"))
        await read_kv_events(router, early, 3)
        world.launcher.handles[1].rank.fails = True
        router.send(ask("c", length=30))
        await read_kv_events(router, early, 0)
        await read_kv_events(router, early, 8)  # c goes on
        assert late.blocks != early.blocks  # what nobody follows is not told


async def test_a_reset_forgets_what_nobody_uses_and_tells_who_follows() -> None:
    async with world_with("cafe") as world:
        router, mirror = await world.connect(), Mirror()
        router.send(ResetPrefixCache(1))  # maybe before the ranks are up: they have nothing
        assert await router.receive() == PrefixCacheReset(1, CacheReset(0, 0, 0))
        await until_ready(router)
        router.send(FollowKvEvents(2))
        router.send(ask("a", "cafe", length=17))
        await read_kv_events(router, mirror, 5)
        router.send(ask("b", length=9))
        await read_kv_events(router, mirror, 8)
        router.send(ResetPrefixCache(3))
        await read_kv_events(router, mirror, 0)
        async with asyncio.timeout(PATIENCE):
            while not isinstance(reply := await router.receive(), PrefixCacheReset):
                pass
        assert reply == PrefixCacheReset(3, CacheReset(8, 0, 0))
        router.send(ask("c", "cafe", length=17))
        (first, *_) = (await router.collect("c"))["c"]
        assert first.num_cached_tokens == 0


async def test_what_was_recorded_over_two_lives_of_the_ranks_replays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recording = RecordingConfig(path=str(path), max_bytes=2**20, version="test")
    async with world_with("cafe", recording=recording) as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("a", "cafe"))
        assert token_ids((await router.collect("a"))["a"]) == expected("cafe")
        world.launcher.handles[1].rank.fails = True
        router.send(ask("b"))
        await router.collect("b")
        await until_ready(router)
        router.send(ask_choices("c", "d"))
        await router.collect("c", "d")
    replay = Replay()
    replay.begin_file()
    for number, record in enumerate(read_records(path)):
        replay.apply(record, number)
        assert replay.difference is None
    assert (replay.counts.schedulers, replay.counts.requests) == (2, 5)  # b in both


async def test_each_rank_is_told_when_it_is_up_with_what_it_computes_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="topwork.scheduler")
    async with world_with() as world:
        await until_ready(await world.connect())
    events = [record.message for record in caplog.records if "is up" in record.message]
    assert events == ["rank 0 is up: 64 pages of KV, products by nothing"] * 2


async def test_a_rank_whose_rows_have_other_bits_in_company_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = ThreadHandle.load

    async def batch_variant(handle: ThreadHandle, store: tuple[str, int]) -> RankInfo:
        info = await load(handle, store)
        names = ("qkv", "down") if handle is world.launcher.handles[1] else ()
        return msgspec.structs.replace(info, rank=handle._index, batch_variant_linears=names)

    monkeypatch.setattr(ThreadHandle, "load", batch_variant)
    async with world_with(open_gate=False) as world:
        world.launcher.gate.set()
        router = await world.connect()
        while not (await router.status()).ready:
            await asyncio.sleep(0.01)
    warnings = [record.message for record in caplog.records if "bits of a row" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1:")
    assert warnings[0].endswith("in qkv, down")
