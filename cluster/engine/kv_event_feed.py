"""Hands the prefix cache's changes to its readers: routers that follow, and the publisher.

Numbers the batches and hands each to all readers in the same order. A follower begins with a
snapshot. It says when it has taken a batch, and only a few are on their way to it at a time, so a
slow one holds up neither a step nor the token streams on its connection; one that falls too far
behind is let go. Without a reader no event is made.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from cluster.errors import ErrorInfo
from cluster.kv_events import AllBlocksCleared, KvEvent, KvEventBatch, KvEventBuffer, num_blocks
from cluster.messages import KvEvents, KvEventsEnded
from cluster.scheduler.kv_cache.events import CacheObserver

logger = logging.getLogger("topwork.scheduler")

MAX_UNTAKEN = 8  # batches on their way to one follower
MAX_BLOCKS_BEHIND = 200_000  # changes that wait for one follower; all of them share the batches


class Follower(Protocol):
    """A router's connection; each is equal only to itself."""

    def send(self, message: KvEvents | KvEventsEnded) -> None:
        """Queue a message."""
        ...


class Publisher(Protocol):
    """Where all batches go, asked for or not."""

    def publish(self, batch: KvEventBatch) -> None:
        """Send a batch to whoever listens; never wait."""
        ...


@dataclass(slots=True)
class _Following:
    snapshot: Iterator[KvEventBatch]
    waiting: deque[KvEventBatch] = field(default_factory=deque)
    num_waiting_blocks: int = 0  # a batch counts for one more than it names
    num_untaken: int = 0


class KvEventFeed:
    """Every reader of one engine's KV events, also when its ranks restart."""

    def __init__(
        self, base_digest: str, clock: Callable[[], float], publisher: Publisher | None = None
    ) -> None:
        self._base_digest = base_digest
        self._clock = clock  # seconds since 1970
        self._publisher = publisher
        self._buffer = KvEventBuffer(base_digest)
        self._following: dict[tuple[Follower, int], _Following] = {}
        self._report_contents: Callable[[CacheObserver], None] | None = None  # None: no cache
        self._sequence = -1  # of the last batch

    @property
    def observer(self) -> CacheObserver:
        """What the next cache reports to; a cache from before `clear` is ignored."""
        return self._buffer

    @property
    def num_followers(self) -> int:
        """Calls that are being answered with batches."""
        return len(self._following)

    def clear(self) -> None:
        """Tell that nothing is cached: at the start, and whenever the ranks are lost.

        At the start it is for those who have read the batches of an earlier process.
        """
        self._report_contents = None
        self._buffer = KvEventBuffer(self._base_digest)
        self._publish((AllBlocksCleared(),))

    def attach(self, report_contents: Callable[[CacheObserver], None]) -> None:
        """Let snapshots be what `report_contents` reports, from now to `clear`.

        The cache is still empty.
        """
        self._report_contents = report_contents

    def flush(self) -> None:
        """Send what has changed since the last call; to be called after every step."""
        if not self._buffer.changes:
            return
        batches = self._buffer.take_batches()
        if self._publisher is None and not self._following:
            return
        for events in batches:
            self._publish(events)

    def follow(self, follower: Follower, call_id: int) -> None:
        """Begin to answer a call: with what the cache holds, then with all changes to it."""
        self.flush()  # what the snapshot includes is not to come again
        key = (follower, call_id)
        assert key not in self._following, f"call {call_id} is in use"
        self._following[key] = _Following(self._snapshot())
        self._send(key, self._following[key])

    def taken(self, follower: Follower, call_id: int) -> None:
        """Note that a follower has taken a batch; a call that has ended is ignored."""
        key = (follower, call_id)
        following = self._following.get(key)
        if following is not None:
            following.num_untaken -= 1
            self._send(key, following)

    def unfollow(self, follower: Follower, call_id: int) -> None:
        """Send no more; a call that has ended is ignored."""
        self._following.pop((follower, call_id), None)

    def forget(self, follower: Follower) -> None:
        """End all calls of a connection that has gone."""
        for key in tuple(self._following):
            if key[0] is follower:
                del self._following[key]

    def _publish(self, events: tuple[KvEvent, ...]) -> None:
        self._sequence += 1
        batch = KvEventBatch(self._sequence, self._clock(), events)
        if self._publisher is not None:
            self._publisher.publish(batch)
        for key, following in tuple(self._following.items()):
            following.waiting.append(batch)
            following.num_waiting_blocks += num_blocks(events) + 1
            self._send(key, following)

    def _snapshot(self) -> Iterator[KvEventBatch]:
        """Note what is cached now; its events are made as they are sent, between later steps."""
        buffer = KvEventBuffer(self._base_digest)
        buffer.cleared()
        if self._report_contents is not None:
            self._report_contents(buffer)
        sequence, ts = self._sequence, self._clock()
        return (KvEventBatch(sequence, ts, events) for events in buffer.take_batches())

    def _send(self, key: tuple[Follower, int], following: _Following) -> None:
        follower, call_id = key
        while following.num_untaken < MAX_UNTAKEN:
            batch = next(following.snapshot, None)
            if batch is None:
                if not following.waiting:
                    return
                batch = following.waiting.popleft()
                following.num_waiting_blocks -= num_blocks(batch.events) + 1
            following.num_untaken += 1
            follower.send(KvEvents(call_id, batch))
        if following.num_waiting_blocks > MAX_BLOCKS_BEHIND:
            logger.warning("a reader of KV events is too slow; letting it go")
            del self._following[key]
            message = f"the reader of KV events is more than {MAX_BLOCKS_BEHIND} blocks behind"
            follower.send(KvEventsEnded(call_id, ErrorInfo("Overloaded", message, retry_after=1)))
