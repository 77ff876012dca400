"""The scheduler shell over real sockets and fake ranks: serving, losing ranks, loading adapters."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.errors import NotFound
from cluster.request import BASE, Request, TokenEvent
from cluster.scheduling.config import SchedulerConfig
from cluster.shells.scheduler_shell import SchedulerShell, SchedulerShellConfig
from cluster.wire import (
    Abort,
    Events,
    SchedulerAddress,
    Status,
    StatusCall,
    Submit,
    Unload,
    Unloaded,
    decode_scheduler_frame,
    encode,
)
from worker.channel import Channel, ChannelClosed, listen
from worker.fake_rank import FakeRank, fake_continuation
from worker.protocol import RankInfo, SamplingParams, StepReply
from worker.step_server import serve_steps

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


class ThreadHandle:
    """A rank in a thread of this process, with the face of an actor's handle."""

    def __init__(self, index: int) -> None:
        self.rank = TroubledRank()
        self._index = index

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return self.rank.load(max_pages=64 + self._index)

    async def serve(self, num_pages: int) -> tuple[str, int]:
        self.rank.allocate(num_pages)
        server = listen("127.0.0.1")

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # what a troubled rank ends with
                serve_steps(self.rank, server, SECRET)  # type: ignore[arg-type]

        threading.Thread(target=run, daemon=True).start()
        host, port = server.getsockname()
        return host, port

    async def load_adapter(self, slot: int, shard: Any) -> None:
        self.rank.load_adapter(slot, shard)

    async def clear_slot(self, slot: int, digest: str) -> None:
        self.rank.clear_slot(slot, digest)


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

    async def shards(self, digest: str, tp: int) -> tuple[Any, ...]:
        if digest not in self._digests:
            raise NotFound(f"adapter {digest} has been unloaded")
        return (digest,) * tp


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

    def __init__(self, shell: SchedulerShell, launcher: ThreadLauncher) -> None:
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
    open_gate: bool = True,
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
    config = SchedulerShellConfig(
        replica="0",
        scheduler=scheduler,
        tp=2,
        start_timeout=start_timeout,
        step_timeout=step_timeout,
        restart_delay=0.01,
    )
    world = World(SchedulerShell(config, launcher, ListedShards(*digests)), launcher)
    world.address = await world.shell.start("127.0.0.1")
    try:
        yield world
    finally:
        await world.close()


async def until_ready(router: RouterEnd) -> Status:
    async with asyncio.timeout(20):
        while not (status := await router.status()).ready:
            await asyncio.sleep(0.01)
    return status


def ask(request_id: str, adapter: str = BASE, n: int = 6, length: int = 9) -> Submit:
    prompt = tuple(range(3, 3 + length))
    return Submit(Request(request_id, adapter, prompt, SamplingParams(), max_tokens=n))


def token_ids(events: list[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.token_ids)


def expected(adapter: str | None = None, n: int = 6, length: int = 9) -> tuple[int, ...]:
    return fake_continuation(adapter, tuple(range(3, 3 + length)), n)


async def test_requests_of_two_routers_get_their_own_tokens() -> None:
    async with world_with("cafe") as world:
        one, two = await world.connect(), await world.connect()
        status = await until_ready(one)
        assert status.total_pages == 64  # the smallest budget of both ranks
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
    async with world_with(step_timeout=0.2) as world:
        router = await world.connect()
        await until_ready(router)
        world.launcher.handles[0].rank.hangs.set()
        router.send(ask("a"))
        error = (await router.collect("a"))["a"][-1].error
        assert error is not None and "did not answer step" in error.message
        await until_ready(router)
        router.send(ask("b"))
        assert token_ids((await router.collect("b"))["b"]) == expected()


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
    async with world_with(start_timeout=0.1, open_gate=False) as world:
        router = await world.connect()
        async with asyncio.timeout(20):
            while "did not start in 0.1 s" not in (await router.status()).reason:
                await asyncio.sleep(0.01)
        world.launcher.gate.set()
        await until_ready(router)


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


async def test_a_router_that_leaves_takes_its_requests_along() -> None:
    async with world_with() as world:
        stays, leaves = await world.connect(), await world.connect()
        await until_ready(stays)
        leaves.send(ask("x", n=100))
        await leaves.receive()
        leaves.close()
        async with asyncio.timeout(20):
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


async def test_a_stranger_without_the_secret_is_shown_the_door() -> None:
    async with world_with() as world:
        door = (world.address.host, world.address.port)
        stranger = await Channel.connect(door, b"x" * 32)
        stranger.send(encode(StatusCall(1)))
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()
