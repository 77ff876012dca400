"""Fake ranks on a test's own event loop, behind real sockets, and what launches them.

All that knows the signatures between pool, engines and ranks is here: how shards are put, loaded
into a slot and cleared from it.
"""

import asyncio
import socket
from collections.abc import Awaitable

import msgspec
from ray.exceptions import WorkerCrashedError

from cluster.adapters.adapter import Adapter
from cluster.adapters.sharding import cut_all
from worker.errors import UnusableAdapter
from worker.lora.shard import AdapterShard
from worker.pools import PageCounts
from worker.protocol import RankInfo, StepReply
from worker.testing.fake_rank import FakeRank
from worker.transport.channel import Channel, ChannelClosed, stop_listening

SECRET = b"s" * 32
TP, PAGE_SIZE = 2, 4


class Handle:
    """What `ray.put` would return for a shard."""

    def __init__(self, shard: AdapterShard) -> None:
        self.shard = shard


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved on."""

    ahead = 0.0  # seconds

    def time(self) -> float:
        """Return the time by which timers go off."""
        return super().time() + self.ahead


async def turns(count: int) -> None:
    """Let everything go on by so many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


class LoopRank:
    """A fake rank on the loop, with the face of an actor's handle; it looks at what it loads."""

    def __init__(self, launcher: "Launcher", index: int) -> None:
        self.rank = FakeRank(page_size=PAGE_SIZE, num_slots=launcher.num_slots)
        self.is_dead = False
        self.is_reached = False  # whoever sends plans has said the secret
        self.fails_next: str | None = None  # "step" or "load"
        self._launcher = launcher
        self._index = index
        self._calls = asyncio.Lock()  # as an actor's, they run one by one in order of arrival
        self._server: asyncio.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def load(self, store: tuple[str, int]) -> RankInfo:
        return self.rank.load(
            PageCounts(self._launcher.num_pages + self._index), PageCounts(6 + self._index)
        )

    async def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        self.rank.allocate(pages, host_pages)
        # With a socket, and not serving yet, nothing here gives up the loop: whoever cancels this
        # call finds either no socket or a server that `end` closes.
        listening = socket.create_server(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._enter, sock=listening, start_serving=False)
        await self._server.start_serving()
        host, port = listening.getsockname()
        return host, port

    def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Handle, ...]
    ) -> Awaitable[int]:
        assert weights == (1.0,), "nobody asks for sums here"
        return asyncio.ensure_future(self._load_adapter(slot, adapter, shards[0].shard))

    async def _load_adapter(self, slot: int, adapter: str, shard: AdapterShard) -> int:
        async with self._calls:
            await turns(self._launcher.load_turns)
            if self.fails_next == "load":
                self._launcher.was_killed_in_load = True
                self.die()
            if self.is_dead:
                raise WorkerCrashedError
            assert shard.digest == adapter
            if shard.digest == self._launcher.unusable and self._index == 1:
                self.rank.clear_slot(slot, self.bank()[slot] or "")  # as a real bank does
                raise UnusableAdapter("rank 1 cannot compute it")
            wanted = self._launcher.shards[shard.digest][self._index]
            assert shard.entries == wanted.entries and (shard.data == wanted.data).all()
            self.rank.load_adapter(slot, adapter)
            return shard.data.nbytes

    def clear_slot(self, slot: int, adapter: str) -> Awaitable[None]:
        return asyncio.ensure_future(self._clear_slot(slot, adapter))

    async def _clear_slot(self, slot: int, adapter: str) -> None:
        async with self._calls:
            if self.is_dead:
                raise WorkerCrashedError
            self.rank.clear_slot(slot, adapter)

    async def prepare_grammar(self, grammar: str) -> bool:
        """Compile nothing."""
        return True

    def bank(self) -> list[str | None]:
        """Return the digest in each slot."""
        return self.rank.bank()

    def die(self) -> None:
        """End as a killed process does, unless its group is lost already."""
        if not any(rank.is_dead for rank in (self, *self._launcher.ranks)):
            self._launcher.num_troubles += 1
        self.end()

    def end(self) -> None:
        """Close every socket."""
        self.is_dead = True
        if self._server is not None:
            stop_listening(self._server)
        if self._serving is not None:
            self._serving.cancel()

    def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await Channel.accepted(reader, writer, SECRET)
            assert channel is not None, "nobody else knows the secret"
            self.is_reached = True
            while True:
                reply = self._step(await channel.receive())
                channel.send(reply)
                if self.is_dead:
                    return
        except ChannelClosed:
            pass

    def _step(self, frame: bytes) -> bytes:
        if self.fails_next == "step":
            self.die()
            return msgspec.msgpack.encode(StepReply(1, error="RuntimeError: on fire"))
        try:
            return msgspec.msgpack.encode(self.rank.step(frame))
        except AssertionError as error:
            self._launcher.bad_plans.append(str(error))
            raise


class Launcher:
    """Launches ranks, and remembers what went wrong with them."""

    secret = SECRET

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        load_turns: int,
        adapters: dict[str, Adapter],
        unusable: str,
    ) -> None:
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.load_turns = load_turns  # of the event loop, that a load takes
        self.unusable = unusable  # digest of what one of the ranks cannot compute
        self.shards = {digest: cut_all(adapter, TP) for digest, adapter in adapters.items()}
        self.ranks: list[LoopRank] = []
        self.num_launches = 0
        self.num_troubles = 0
        self.was_killed_in_load = False
        self.bad_plans: list[str] = []  # what no right scheduler sends

    async def launch(self) -> tuple[LoopRank, ...]:
        self.num_launches += 1
        self.ranks = [LoopRank(self, index) for index in range(TP)]
        return tuple(self.ranks)

    async def kill(self, *, at_once: bool) -> None:
        for rank in self.ranks:
            rank.end()
        self.ranks = []
