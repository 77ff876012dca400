"""The Ray actor of one rank: starts it, loads adapters into it, and runs its step server.

Only set-up, adapter loads and the end pass through Ray calls; the steps themselves come over a
socket that the scheduler connects to (see worker.engine.step_server).
"""

import logging
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from msgspec.structs import replace

from worker.engine.step_server import serve_steps
from worker.errors import GroupBroken
from worker.lora.shard import AdapterShard
from worker.pools import PageCounts
from worker.protocol import RankConfig, RankInfo
from worker.transport.channel import listen

if TYPE_CHECKING:
    from worker.engine.rank import Rank

logger = logging.getLogger("topwork.worker")

FETCH_TIMEOUT = 20.0  # seconds until the shards of an adapter must be here


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names one process for good: a pid alone may be given to another process later."""

    node_id: str
    node_ip: str
    pid: int
    start_ticks: int  # since boot


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def node_ip() -> str:
    """Return the address by which other nodes reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class WorkerActor:
    """One rank in its own process."""

    def __init__(
        self, config: RankConfig, secret: bytes, group_timeout: float, on_loopback: bool = False
    ) -> None:
        self._config = config
        self._on_loopback = on_loopback  # whether all ranks are on this node, and meet there
        self._secret = secret
        self._group_timeout = group_timeout
        self._rank: Rank | None = None

    @ray.method
    def identify(self) -> ProcessIdentity:
        """Return which process this is."""
        ticks = start_ticks(os.getpid())
        assert ticks is not None, "this process runs"
        return ProcessIdentity(
            node_id=ray.get_runtime_context().get_node_id(),
            node_ip=node_ip(),
            pid=os.getpid(),
            start_ticks=ticks,
        )

    @ray.method
    def rendezvous(self) -> tuple[str, int]:
        """Return a (host, port) of this node that is free for the ranks to meet at."""
        host = "127.0.0.1" if self._on_loopback else node_ip()
        with socket.create_server((host, 0)) as probe:
            port: int = probe.getsockname()[1]
        return host, port

    @ray.method
    def load(self, store: tuple[str, int]) -> RankInfo:
        """Join the process group at `store` and load this rank's slices of the weights."""
        # Here, as they bring torch, which takes a second: the launcher, which reads this class, and
        # so the server's own process, the schedulers and the routers start without it.
        from worker.distributed.parallel import join_group
        from worker.engine.rank import Rank

        config = self._config
        host, port = store
        group = join_group(
            *(f"tcp://{host}:{port}", config.rank, config.tp, config.device),
            self._group_timeout,
            self._secret,
        )
        self._rank = Rank(config, group)
        info = self._rank.load()
        return replace(info, node_id=ray.get_runtime_context().get_node_id())

    @ray.method
    def measure_pages(self) -> PageCounts:
        """Return how many pages the GPU has left, in a step that all ranks run together."""
        return self._ready_rank().measure_pages()

    @ray.method
    def serve(self, pages: PageCounts, host_pages: PageCounts) -> tuple[str, int]:
        """Allocate the KV pages, warm up, start the step server and return its address."""
        rank = self._ready_rank()
        rank.allocate(pages, host_pages)
        rank.warm_up()
        server = listen(node_ip())
        threading.Thread(
            target=_serve_steps, args=(rank, server, self._secret), name="steps", daemon=True
        ).start()
        host, port = server.getsockname()[:2]
        return str(host), int(port)

    @ray.method
    def load_adapter(
        self,
        slot: int,
        adapter: str,
        weights: tuple[float, ...],
        shards: "list[ray.ObjectRef[AdapterShard]]",
    ) -> int:
        """Put an adapter into a slot that no plan uses; return the bytes it holds on the device.

        The shards, one for each weight, are fetched here: as an argument of its own, one that
        never arrives would hold up all later calls.

        Raises:
            RayError: if a shard is lost, or does not arrive in FETCH_TIMEOUT.
        """
        fetched: list[AdapterShard] = ray.get(shards, timeout=FETCH_TIMEOUT)
        return self._ready_rank().load_adapter(slot, adapter, weights, tuple(fetched))

    @ray.method
    def clear_slot(self, slot: int, adapter: str) -> None:
        """Free the memory of a slot that no plan uses, if it still holds this adapter."""
        self._ready_rank().clear_slot(slot, adapter)

    @ray.method
    def prepare_grammar(self, grammar: str) -> bool:
        """Compile a grammar that sequences will follow; False: not yet, ask again."""
        return self._ready_rank().prepare_grammar(grammar)

    def _ready_rank(self) -> "Rank":
        assert self._rank is not None, "load() comes first"
        return self._rank


def _serve_steps(rank: "Rank", server: socket.socket, secret: bytes) -> None:
    try:
        serve_steps(rank, server, secret)
    except GroupBroken as error:  # the scheduler has been told; the cause is another rank's
        logger.warning("%s", error)
