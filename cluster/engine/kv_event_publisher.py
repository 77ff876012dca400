"""KV events over ZeroMQ, as subscribers of vLLM's read them.

Owns a PUB socket, whose messages are [topic, number as 8 bytes big-endian, payload], and a ROUTER
socket for those who missed some: a request is such a number, the answer all batches from it on
that are still kept, each as [number, payload], and number -1 at the end. Never waits for a reader:
what a slow subscriber does not take in time is lost to it, and the numbers tell it so. There is no
key on these sockets: whoever can connect reads the prompts' tokens.
"""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass

import zmq
import zmq.asyncio

from cluster.kv_events import KvEventBatch, vllm_payload

logger = logging.getLogger("topwork.scheduler")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 64
REPLAY_STRIDE = 16  # batches sent to one reader before others have a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventPublisherConfig:
    """Where to publish and how much to keep."""

    endpoint: str  # such as tcp://127.0.0.1:5557
    replay_endpoint: str | None = None
    topic: str = ""  # llm-d wants kv@POD@MODEL
    max_unsent: int = 10_000  # batches queued for one subscriber; more are dropped
    max_kept: int = 10_000  # batches, and
    max_kept_bytes: int = 64 * 1024 * 1024


def offset_port(endpoint: str, number: int) -> str:
    """Return the endpoint of replica `number`: replica 0 has the given port, others those above.

    Raises:
        ValueError: if the endpoint is not tcp://HOST:PORT.
    """
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"{endpoint!r} is not of the form tcp://HOST:PORT")
    return f"tcp://{host}:{int(port) + number}"


class KvEventPublisher:
    """Both sockets; belongs to the event loop in which it was opened."""

    def __init__(self, config: KvEventPublisherConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.asyncio.Socket | None = None
        self._answering: asyncio.Task[None] | None = None
        self._kept: deque[tuple[bytes, bytes]] = deque()  # number, payload
        self._num_kept_bytes = 0

    def open(self) -> None:
        """Bind the sockets.

        Raises:
            OSError: naming the endpoint that cannot be had.
        """
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = self._config.max_unsent
        _bind(self._pub, self._config.endpoint)
        if self._config.replay_endpoint is not None:
            self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
            # Room for one whole answer to each reader; one that asks again without reading loses.
            self._replay.sndhwm = self._config.max_kept + 1
            self._replay.maxmsgsize = MAX_REQUEST_BYTES
            _bind(self._replay, self._config.replay_endpoint)
            self._answering = asyncio.create_task(self._answer_all(self._replay))

    async def close(self) -> None:
        """Close the sockets; what is unsent is lost."""
        if self._answering is not None:
            self._answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._answering
        for opened in (self._pub, self._replay):
            if opened is not None:
                opened.close(linger=0)
        self._context.term()

    def publish(self, batch: KvEventBatch) -> None:
        """Send a batch to all subscribers and keep it for replays; never wait."""
        assert self._pub is not None, "open() comes first"
        number, payload = batch.sequence.to_bytes(8, "big"), vllm_payload(batch)
        # A PUB socket drops what a subscriber has no room for, so that this cannot fail or block.
        self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        if self._replay is not None:
            self._keep(number, payload)

    def _keep(self, number: bytes, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while (
            len(self._kept) > self._config.max_kept
            or self._num_kept_bytes > self._config.max_kept_bytes
        ):
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    async def _answer_all(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            request = await replay.recv_multipart()
            if len(request) != 3 or request[1] or len(request[2]) != 8:
                logger.warning("ignored a malformed request for a replay of KV events")
                continue
            await self._answer(replay, request[0], request[2])

    async def _answer(self, replay: zmq.asyncio.Socket, reader: bytes, first: bytes) -> None:
        # Big-endian numbers of one width are ordered as their bytes are.
        kept = [(number, payload) for number, payload in self._kept if number >= first]
        for index, (number, payload) in enumerate(kept):
            if index % REPLAY_STRIDE == 0:
                await asyncio.sleep(0)  # a step may be waiting for its turn
            await replay.send_multipart((reader, b"", number, payload))
        await replay.send_multipart((reader, b"", END_OF_REPLAY, b""))


def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(f"cannot publish KV events on {endpoint}: {error}") from error
