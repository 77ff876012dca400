"""The scheduler shell over real sockets and fake ranks: serving, losing ranks, loading adapters."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ray.exceptions import WorkerCrashedError

from cluster.engine.engine import Engine, EngineConfig
from cluster.engine.executor import Executor
from cluster.engine.recording import RecordingConfig
from cluster.engine.supervisor import SupervisorConfig
from cluster.errors import NotFound
from cluster.messages import (
    Abort,
    Allow,
    Events,
    FollowKvEvents,
    KeepPinned,
    KvEvents,
    KvEventsTaken,
    SchedulerAddress,
    Status,
    StatusCall,
    Submit,
    UnfollowKvEvents,
    Unload,
    Unloaded,
    decode_scheduler_frame,
    encode,
)
from cluster.request import BASE, Request, TokenEvent
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.replay.replayer import Replay
from cluster.weighted_adapters import compose, parts_of
from tests.cluster.kv_mirror import Mirror
from tests.cluster.scheduler.random_life import read_records
from tests.patience import PATIENCE
from worker.channel import Channel, ChannelClosed, listen
from worker.engine.step_server import serve_steps
from worker.lora.shard import UnusableAdapter
from worker.protocol import RankInfo, SamplingParams, StepReply
from worker.testing.fake_rank import FakeRank, fake_continuation

SECRET = b"s" * 32


class TroubledRank(FakeRank):
    """A fake rank that can be made to fail or to hang in its next step."""

    def __init__(self) -> None:
        super().__init__(page_size=4, num_slots=2)
        self.fails = False
        self.hangs = threading.Event()
        self.freed = threading.Event()

    def step(self, frame: bytes) -> StepReply:
        if self.fails:
            raise RuntimeError("the memory is on fire")
        if self.hangs.is_set():
            self.freed.wait()
        return super().step(frame)


LOAD_ERRORS = {
    "odd": UnusableAdapter("layers.0.mlp.up_proj: its DoRA divides by zero"),
    "deadly": WorkerCrashedError(),
}


class ThreadHandle:
    """A rank in a thread of this process, with the face of an actor's handle."""

    def __init__(self, index: int) -> None:
        self.rank = TroubledRank()
        self._index = index

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return self.rank.load(max_pages=64 + self._index, max_host_pages=8 + self._index)

    async def serve(self, num_pages: int, num_host_pages: int) -> tuple[str, int]:
        self.rank.allocate(num_pages, num_host_pages)
        server = listen("127.0.0.1")

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # what a troubled rank ends with
                serve_steps(self.rank, server, SECRET)  # type: ignore[arg-type]

        threading.Thread(target=run, daemon=True).start()
        host, port = server.getsockname()
        return host, port

    async def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Any, ...]
    ) -> int:
        assert shards == tuple(digest for digest, _ in parts_of(adapter))
        if self._index == 1 and adapter in LOAD_ERRORS:
            raise LOAD_ERRORS[adapter]
        assert weights == tuple(weight for _, weight in parts_of(adapter))
        self.rank.load_adapter(slot, adapter, weights)
        return 100 * len(shards) + self._index

    async def clear_slot(self, slot: int, adapter: str) -> None:
        self.rank.clear_slot(slot, adapter)


class ThreadLauncher:
    secret = SECRET

    def __init__(self) -> None:
        self.handles: list[ThreadHandle] = []
        self.launches = 0
        self.gate = asyncio.Event()

    async def launch(self) -> tuple[ThreadHandle, ...]:
        await self.gate.wait()
        self.launches += 1
        self.handles = [ThreadHandle(i) for i in range(2)]
        return tuple(self.handles)

    async def kill(self) -> None:
        for handle in self.handles:
            handle.rank.freed.set()
        self.handles = []


class ListedShards:
    """A pool that knows some digests."""

    def __init__(self, *digests: str) -> None:
        self._digests = digests

    async def shards(self, adapter: str) -> tuple[Any, ...]:
        digests = [digest for digest, _ in parts_of(adapter)]
        for digest in digests:
            if digest not in self._digests:
                raise NotFound(f"adapter {digest} has been unloaded")
        return tuple((digest, digest) for digest in digests)

    async def prefetch(self, adapter: str) -> None:
        await self.shards(adapter)


class RouterEnd:
    """The router's side of a connection, reduced to what tests need."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: Any) -> None:
        self._channel.send(encode(message))

    async def receive(self) -> Any:
        return decode_scheduler_frame(await self._channel.receive())

    async def collect(self, *request_ids: str) -> dict[str, list[TokenEvent]]:
        """Return all events of the requests, up to the end of each."""
        events: dict[str, list[TokenEvent]] = {name: [] for name in request_ids}
        open_requests = set(request_ids)
        while open_requests:
            message = await self.receive()
            assert isinstance(message, Events), message
            for event in message.events:
                events[event.request_id].append(event)
                if event.finish_reason is not None:
                    open_requests.remove(event.request_id)
        return events

    async def status(self) -> Status:
        self.send(StatusCall(7))
        while not isinstance(message := await self.receive(), Status):
            pass
        return message

    def close(self) -> None:
        self._channel.close()


class World:
    """A running shell and everything around it."""

    def __init__(self, shell: Engine, launcher: ThreadLauncher) -> None:
        self.launcher = launcher
        self.shell = shell
        self.address = SchedulerAddress("", "", 0, b"")
        self._routers: list[RouterEnd] = []

    async def connect(self) -> RouterEnd:
        address = self.address
        channel = await Channel.connect((address.host, address.port), address.secret)
        self._routers.append(RouterEnd(channel))
        return self._routers[-1]

    async def close(self) -> None:
        for router in self._routers:
            router.close()
        await self.shell.close()


@asynccontextmanager
async def world_with(
    *digests: str,
    start_timeout: float = 30.0,
    step_timeout: float = 30.0,
    request_timeout: float | None = None,
    open_gate: bool = True,
    recording: RecordingConfig | None = None,
) -> AsyncIterator[World]:
    launcher = ThreadLauncher()
    if open_gate:
        launcher.gate.set()
    scheduler = SchedulerConfig(
        base_digest="b",
        num_pages=0,
        page_size=4,
        max_model_len=128,
        num_slots=2,
        max_running=8,
        max_waiting=4,
        token_budget=16,
        max_chunk=16,
    )
    config = EngineConfig(
        replica="0",
        ranks=SupervisorConfig(
            scheduler=scheduler,
            start_timeout=start_timeout,
            step_timeout=step_timeout,
            restart_delay=0.01,
        ),
        request_timeout=request_timeout,
        recording=recording,
    )
    world = World(Engine(config, launcher, ListedShards(*digests)), launcher)
    world.address = await world.shell.start("127.0.0.1")
    try:
        yield world
    finally:
        await world.close()


async def until_ready(router: RouterEnd) -> Status:
    async with asyncio.timeout(PATIENCE):
        while not (status := await router.status()).ready:
            await asyncio.sleep(0.01)
    return status


def ask(request_id: str, adapter: str = BASE, n: int = 6, length: int = 9) -> Submit:
    prompt = tuple(range(3, 3 + length))
    return Submit((Request(request_id, adapter, prompt, SamplingParams(), max_tokens=n),))


def ask_choices(*request_ids: str, n: int = 6, length: int = 9) -> Submit:
    """Return one prompt with a choice for each id, of seeds 0, 1, 2, ..."""
    prompt = tuple(range(3, 3 + length))
    return Submit(
        tuple(
            Request(request_id, BASE, prompt, SamplingParams(seed=seed), max_tokens=n)
            for seed, request_id in enumerate(request_ids)
        )
    )


def token_ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def expected(
    adapter: str | None = None, n: int = 6, length: int = 9, seed: int = 0
) -> tuple[int, ...]:
    return fake_continuation(adapter, tuple(range(3, 3 + length)), n, seed=seed)


async def test_requests_of_two_routers_get_their_own_tokens() -> None:
    async with world_with("cafe") as world:
        one, two = await world.connect(), await world.connect()
        status = await until_ready(one)
        # the smallest budgets of both ranks
        assert (status.total_pages, status.total_host_pages) == (64, 8)
        one.send(ask("same-id"))
        two.send(ask("same-id", "cafe"))
        two.send(ask("long", n=40))
        assert token_ids((await one.collect("same-id"))["same-id"]) == expected()
        told = await two.collect("same-id", "long")
        assert token_ids(told["same-id"]) == expected("cafe")
        assert token_ids(told["long"]) == expected(n=40)


async def test_a_rank_that_fails_ends_its_requests_with_503_and_the_group_comes_back() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[1].rank.fails = True
        router.send(ask("a"))
        error = (await router.collect("a"))["a"][-1].error
        assert error is not None
        assert (error.name, error.retry_after is not None) == ("Unavailable", True)
        assert "on fire" in error.message
        status = await until_ready(router)
        assert (world.launcher.launches, status.restarts) == (2, 1)
        router.send(ask("b"))
        assert token_ids((await router.collect("b"))["b"]) == expected()


async def test_a_rank_that_hangs_is_found_by_the_step_timeout() -> None:
    async with world_with(step_timeout=1.0) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[0].rank.hangs.set()
        router.send(ask("a"))
        error = (await router.collect("a"))["a"][-1].error
        assert error is not None and "did not answer step" in error.message
        await until_ready(router)
        router.send(ask("b"))
        assert token_ids((await router.collect("b"))["b"]) == expected()


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
                    while not (await router.status()).num_running:
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


async def test_an_adapter_that_is_gone_fails_only_its_own_requests() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("gone", "dead"), ("here", "cafe"), ("base", BASE)):
            router.send(ask(request_id, adapter))
        told = await router.collect("gone", "here", "base")
        assert told["gone"][-1].error is not None
        assert told["gone"][-1].error.name == "NotFound"
        assert token_ids(told["here"]) == expected("cafe")
        assert token_ids(told["base"]) == expected()


async def test_an_adapter_that_a_rank_cannot_compute_fails_only_its_own_requests() -> None:
    async with world_with("cafe", "odd") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("a", "odd"), ("b", "odd"), ("here", "cafe"), ("base", BASE)):
            router.send(ask(request_id, adapter))
        told = await router.collect("a", "b", "here", "base")
        for name in ("a", "b"):
            error = told[name][-1].error
            assert error is not None and error.name == "InvalidAdapter"
            assert "divides by zero" in error.message
        assert token_ids(told["here"]) == expected("cafe")
        assert (await router.status()).restarts == 0
        assert [slot.adapter for slot in (await router.status()).slots] == ["cafe"]


async def test_a_sum_of_adapters_is_served_from_the_shards_of_its_parts() -> None:
    both = compose([("cafe", 0.5), ("fade", -1.0)])
    async with world_with("cafe", "fade") as world:
        router = await world.connect()
        await until_ready(router)
        for request_id, adapter in (("sum", both), ("one", "cafe")):
            router.send(ask(request_id, adapter))
        told = await router.collect("sum", "one")
        assert token_ids(told["sum"]) == expected(both) != expected("cafe")
        assert token_ids(told["one"]) == expected("cafe")


async def test_a_group_says_what_an_adapter_holds_on_each_rank() -> None:
    launcher = ThreadLauncher()
    launcher.gate.set()
    group = Executor(launcher, start_timeout=30.0, step_timeout=30.0)
    await group.start()
    assert await group.load_adapter(0, "cafe", (("cafe", "cafe"),)) == (100, 101)
    both = compose([("cafe", 2.0), ("fade", 1.0)])
    assert await group.load_adapter(1, both, (("cafe",) * 2, ("fade",) * 2)) == (200, 201)
    await group.kill()


async def test_a_rank_that_dies_of_a_load_ends_all_requests_and_the_group_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world_with("deadly") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "deadly"))
        told = await router.collect("x")
        assert told["x"][-1].error is not None
        assert told["x"][-1].error.name == "Unavailable"
        await until_ready(router)
        router.send(ask("y"))
        assert token_ids((await router.collect("y"))["y"]) == expected()
    told_to_log = [record for record in caplog.records if "restarting" in record.message]
    assert [type(one.args[0]) for one in told_to_log if one.args] == [str], "it keeps shards alive"


async def test_a_router_that_leaves_takes_its_requests_along() -> None:
    async with world_with() as world:
        stays, leaves = await world.connect(), await world.connect()
        await until_ready(stays)
        leaves.send(ask("x", n=100))
        await leaves.receive()
        leaves.close()
        async with asyncio.timeout(PATIENCE):
            while (status := await stays.status()).num_running > 0:
                await asyncio.sleep(0.01)
        assert status.held_pages == 0
        assert status.free_pages + status.cached_pages == status.total_pages


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
        assert (await router.status()).held_pages == 0


async def test_unload_waits_for_running_requests_and_then_answers() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe"))
        order = []
        while len(order) < 2:
            message = await router.receive()
            if isinstance(message, Unloaded):
                assert message.call_id == 3
                order.append("unloaded")
            elif isinstance(message, Events):
                order += ["end" for e in message.events if e.finish_reason is not None]
        assert order == ["end", "unloaded"]
        status = await router.status()
        assert status.slots == ()
        assert status.cached_pages == 0


async def test_a_forced_unload_ends_running_requests_with_the_reason() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe", force=True))
        told = await router.collect("x")
        assert [e.error.name for e in told["x"] if e.error] == ["NotFound"]
        while not isinstance(await router.receive(), Unloaded):
            pass
        assert (await router.status()).slots == ()


async def test_an_unload_that_waits_can_be_taken_back() -> None:
    async with world_with("cafe") as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask("x", "cafe", n=20))
        await router.receive()
        router.send(Unload(3, "cafe"))
        router.send(Allow("cafe"))
        router.send(ask("y", "cafe"))
        answers: list[Unloaded] = []
        told: dict[str, list[TokenEvent]] = {"x": [], "y": []}
        while not answers or not all(e and e[-1].finish_reason for e in told.values()):
            message = await router.receive()
            if isinstance(message, Unloaded):
                answers.append(message)
            elif isinstance(message, Events):
                for event in message.events:
                    told[event.request_id].append(event)
        assert answers == [Unloaded(3, freed_pages=0, freed_slots=())]
        assert token_ids(told["y"]) == expected("cafe")


async def test_pins_outlive_the_ranks() -> None:
    async with world_with("cafe", "beef") as world:
        router = await world.connect()
        router.send(KeepPinned({"cafe": 100}))
        await until_ready(router)
        for life in range(2):
            router.send(ask(f"a{life}", "cafe"))
            router.send(ask(f"b{life}", "beef"))
            await router.collect(f"a{life}", f"b{life}")
            pinned = {slot.adapter: slot.pinned for slot in (await router.status()).slots}
            assert pinned == {"cafe": True, "beef": False}
            if life == 0:
                world.launcher.handles[1].rank.fails = True
                router.send(ask("c"))
                await router.collect("c")
                await until_ready(router)
        router.send(KeepPinned({}))
        router.send(ask("d"))
        await router.collect("d")
        assert not any(slot.pinned for slot in (await router.status()).slots)


async def test_too_many_waiting_requests_are_refused_as_overload() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        names = [str(i) for i in range(40)]
        for name in names:
            router.send(ask(name, n=30))
        told = await router.collect(*names)
        errors = [e.error.name for events in told.values() for e in events if e.error]
        assert errors and set(errors) == {"Overloaded"}


async def test_choices_get_what_single_requests_with_their_seeds_get() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask_choices("a", "b", "c", length=10))
        told = await router.collect("a", "b", "c")
        for seed, request_id in enumerate(("a", "b", "c")):
            assert token_ids(told[request_id]) == expected(length=10, seed=seed)
        status = await router.status()
        assert (status.forked_sequences, status.prompt_tokens) == (2, 30)
        assert status.held_pages == 0


async def test_an_aborted_choice_leaves_the_others_running() -> None:
    async with world_with() as world:
        for gone in ("a", "b"):  # the one that computes the prompt, and one that waits for it
            router = await world.connect()
            await until_ready(router)
            router.send(ask_choices("a", "b", "c"))
            router.send(Abort(gone))
            kept = [name for name in ("a", "b", "c") if name != gone]
            told = await router.collect(*kept)
            for name in kept:
                assert token_ids(told[name]) == expected(seed="abc".index(name))
        assert (await router.status()).held_pages == 0


async def test_more_choices_than_the_queue_could_ever_hold_are_all_refused() -> None:
    async with world_with() as world:
        router = await world.connect()
        await until_ready(router)
        router.send(ask_choices("a", "b", "c", "d", "e"))  # max_waiting is 4
        told = await router.collect("a", "b", "c", "d", "e")
        for events in told.values():
            assert [event.error.name for event in events if event.error] == ["InvalidRequest"]
            assert token_ids(events) == ()
        router.send(ask_choices("a", "b", "c", "d"))
        told = await router.collect("a", "b", "c", "d")
        assert token_ids(told["d"]) == expected(seed=3)


async def test_choices_while_the_ranks_start_are_each_refused() -> None:
    async with world_with(open_gate=False) as world:
        router = await world.connect()
        router.send(ask_choices("a", "b"))
        told = await router.collect("a", "b")
        for events in told.values():
            assert [event.error.name for event in events if event.error] == ["Unavailable"]


async def test_a_request_that_takes_longer_than_it_may_ends_with_an_error() -> None:
    async with world_with(request_timeout=0.2) as world:
        router = await world.connect()
        await until_ready(router)
        hanging = world.launcher.handles[0].rank
        hanging.hangs.set()
        router.send(ask_choices("a", "b"))
        told = await router.collect("a", "b")
        for events in told.values():
            assert [event.error.name for event in events if event.error] == ["DeadlineExceeded"]
        hanging.hangs.clear()
        hanging.freed.set()
        async with asyncio.timeout(PATIENCE):
            while (status := await router.status()).num_running + status.num_waiting > 0:
                await asyncio.sleep(0.01)
        assert status.held_pages == 0


async def test_a_stranger_without_the_secret_is_shown_the_door() -> None:
    async with world_with() as world:
        door = (world.address.host, world.address.port)
        stranger = await Channel.connect(door, b"x" * 32)
        stranger.send(encode(StatusCall(1)))
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()


async def test_a_connection_that_has_not_said_the_secret_yet_is_closed_with_the_door() -> None:
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
        await until_ready(router)
        router.send(ask("d", length=9))
        await read_kv_events(router, early, 3)
        assert late.blocks != early.blocks  # what nobody follows is not told


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
    assert (replay.counts.lives, replay.counts.requests) == (2, 4)


async def test_each_rank_is_told_when_it_is_up_with_what_it_computes_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="topwork.scheduler")
    async with world_with() as world:
        await until_ready(await world.connect())
    told = [record.message for record in caplog.records if "is up" in record.message]
    assert told == ["rank 0 is up: 64 pages of KV, products by nothing"] * 2


async def test_a_rank_whose_rows_have_other_bits_in_company_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = ThreadHandle.load

    async def unsteady(handle: ThreadHandle, store: tuple[str, int]) -> RankInfo:
        info = await load(handle, store)
        names = ("qkv", "down") if handle is world.launcher.handles[1] else ()
        return msgspec.structs.replace(info, rank=handle._index, unsteady=names)

    monkeypatch.setattr(ThreadHandle, "load", unsteady)
    async with world_with(open_gate=False) as world:
        world.launcher.gate.set()
        router = await world.connect()
        while not (await router.status()).ready:
            await asyncio.sleep(0.01)
    warnings = [record.message for record in caplog.records if "bits of a row" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1:")
    assert warnings[0].endswith("in qkv, down")
