"""GET /v1/kv_events: what the prefix caches of all schedulers hold, and every change, as a stream.

Owns the readers. A reader follows every scheduler that is connected, now or later, and takes one
batch after the other as fast as its HTTP client does; what waits for it waits in the scheduler,
which lets it go when that is too much.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.auth import Authenticator
from cluster.api.http import EventStream, sse
from cluster.api.openapi.operation import Operation, declared
from cluster.api.schemas.operations import KvMessage
from cluster.errors import ErrorInfo, Overloaded, TopworkError, Unavailable, error_from
from cluster.kv_events import AllBlocksCleared, KvEventBatch, json_event
from cluster.router.engine_client import EngineClient
from cluster.router.replica_set import ReplicaSet
from cluster.router.router import Router

MAX_READERS = 16  # each costs every scheduler a snapshot and a queue
KEEP_ALIVE_SECONDS = 15.0  # between signs of life for the proxies on the way
KEEP_ALIVE = b": nothing new\n\n"


KV_EVENTS = Operation(
    tag="operations",
    summary="Streams what the prefix caches hold and how that changes.",
    right="events",
    events=(KvMessage,),
    errors=(Overloaded, Unavailable),
)


def _message(replica: str, batch: KvEventBatch) -> bytes:
    events = [json_event(event) for event in batch.events]
    return sse(KvMessage(replica, batch.sequence, batch.ts, events))


class KvReader:
    """One call's view of all schedulers; a context that follows them from entry to exit."""

    def __init__(self, schedulers: ReplicaSet) -> None:
        self.let_go = asyncio.Event()  # a scheduler sends no more: the client must begin again
        self._schedulers = schedulers
        self._calls: dict[EngineClient, int] = {}  # the latest connection to each replica
        self._last: dict[EngineClient, int] = {}  # sequence number delivered
        self._batches: deque[tuple[EngineClient, KvEventBatch]] = deque()
        self._error: TopworkError | None = None
        self._arrived = asyncio.Event()

    def __enter__(self) -> "KvReader":
        self._schedulers.watch(self._follow)
        return self

    def __exit__(self, *_: object) -> None:
        self._schedulers.unwatch(self._follow)
        for client, call_id in self._calls.items():
            client.unfollow_kv_events(call_id)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events; asking for the next one says that the last one was taken.

        Raises:
            TopworkError: why a scheduler sends no more, after what it has sent.
        """
        while True:
            while not self._batches:
                if self._error is not None:
                    raise self._error
                if not await self._wait():
                    yield KEEP_ALIVE
            client, batch = self._batches.popleft()
            yield _message(client.address.replica, batch)
            if client in self._calls:
                client.kv_events_taken(self._calls[client])

    def deliver(self, client: EngineClient, batch: KvEventBatch) -> None:
        """Take a batch; one of a connection that has been replaced is dropped."""
        if client in self._calls:
            self._last[client] = batch.sequence
            self._put(client, batch)

    def ended(self, client: EngineClient, error: ErrorInfo) -> None:
        """Learn that a scheduler lets this reader go."""
        self._error = error_from(error)
        self.let_go.set()
        self._arrived.set()

    def lost(self, client: EngineClient) -> None:
        """Tell the client that nothing is known of a replica any more."""
        if self._calls.pop(client, None) is not None:
            sequence = self._last.pop(client, 0)
            self._drop(client.address.replica)
            self._put(client, KvEventBatch(sequence, time.time(), (AllBlocksCleared(),)))

    def _follow(self, client: EngineClient) -> None:
        for other in tuple(self._calls):
            if other.address.replica == client.address.replica:
                other.unfollow_kv_events(self._calls.pop(other))
                self._last.pop(other, None)
                self._drop(other.address.replica)
        self._calls[client] = client.follow_kv_events(self)

    def _drop(self, replica: str) -> None:
        """Forget what waits to be taken of a replica: the next batch makes it void."""
        self._batches = deque(
            (client, batch) for client, batch in self._batches if client.address.replica != replica
        )

    def _put(self, client: EngineClient, batch: KvEventBatch) -> None:
        self._batches.append((client, batch))
        self._arrived.set()

    async def _wait(self) -> bool:
        """Wait for a batch or an error; return whether there is one."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True


class KvEventStream(EventStream):
    """The response to one reader; it is cut off when a scheduler lets the reader go."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes], let_go: asyncio.Event) -> None:
        super().__init__(first, rest)
        self._let_go = let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; what a client does not read must not hold this up for ever."""
        sending = asyncio.create_task(super().__call__(scope, receive, send))
        letting_go = asyncio.create_task(self._let_go.wait())
        try:
            await asyncio.wait({sending, letting_go}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            letting_go.cancel()
            await asyncio.gather(sending, letting_go, return_exceptions=True)


def kv_event_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the route of KV events."""
    routes = APIRouter()
    readers: set[KvReader] = set()

    async def stream(reader: KvReader) -> AsyncGenerator[bytes]:
        readers.add(reader)
        try:
            with reader:
                async with aclosing(reader.events()) as events:
                    async for event in events:
                        yield event
        finally:
            readers.discard(reader)

    @routes.get("/v1/kv_events", openapi_extra=declared(KV_EVENTS))
    async def kv_events(http: HttpRequest) -> Response:
        """Stream one line of JSON per batch: {"replica", "sequence", "ts", "events"}.

        A replica begins with AllBlocksCleared and its content, in batches that all have one
        sequence number; every later batch has the next number. AllBlocksCleared comes as well when
        a replica is lost.
        """
        with keys.administrative(http, "kv_events", "events"):
            if len(readers) >= MAX_READERS:
                raise Overloaded(f"{MAX_READERS} readers of KV events are served already")
            if not router.replicas.clients:
                raise Unavailable("no scheduler is up", retry_after=router.config.retry_after)
            reader = KvReader(router.replicas)
            events = stream(reader)
            first = await anext(events)
        return KvEventStream(first, events, reader.let_go)

    return routes
