"""What schedulers keep of calls, asked of all of them: to read on, to look at, to end.

A call is in one scheduler, or in several when it had to go on elsewhere: then the one counts that
has not broken off and has most of it.
"""

import asyncio
from collections.abc import Awaitable, Callable

from cluster.errors import Unavailable
from cluster.messages import Claimed
from cluster.router.engine_client import EngineClient
from cluster.router.event_queue import EventQueue
from cluster.router.generation import ClaimedCall
from cluster.router.replica_set import ReplicaSet


class KeptCalls:
    """The kept calls of a cluster, as one router sees them."""

    def __init__(
        self, replicas: ReplicaSet, timeout: float, unique_id: Callable[[str], str]
    ) -> None:
        self._replicas = replicas
        self._timeout = timeout  # seconds that a scheduler may take to answer
        self._unique_id = unique_id

    async def claim(self, stream_id: str) -> ClaimedCall | None:
        """Return a call for its next reader; None if there is none.

        Whoever reads it until now does no more.
        """
        prefix = self._unique_id("claimed")
        clients = [(client, EventQueue()) for client in self._replicas.clients]
        answers = await asyncio.gather(
            *(self._answer(client.claim(stream_id, prefix, queue)) for client, queue in clients)
        )
        calls = [
            ClaimedCall(answer, client, prefix, queue)
            for (client, queue), answer in zip(clients, answers, strict=True)
            if answer is not None and answer.requests
        ]
        calls.sort(key=lambda call: _order(call.claimed))
        for other in calls[:-1]:
            other.release(stream_id)
        return calls[-1] if calls else None

    async def look(self, stream_id: str) -> Claimed | None:
        """Return what there is of a call, whose reader keeps it; None if there is none.

        Raises:
            Unavailable: if a scheduler that may have it does not answer.
        """
        return await self._best(lambda client: client.look(stream_id))

    async def end(self, stream_id: str, *, forgets: bool) -> Claimed | None:
        """End what runs of a call; return as `look` what there was.

        With `forgets` nothing of it is kept.

        Raises:
            Unavailable: as `look`.
        """
        return await self._best(lambda client: client.end_kept(stream_id, forgets=forgets))

    async def _best(self, ask: Callable[[EngineClient], Awaitable[Claimed]]) -> Claimed | None:
        clients = self._replicas.clients
        answers = await asyncio.gather(*(self._answer(ask(client)) for client in clients))
        found = [answer for answer in answers if answer is not None and answer.requests]
        if not found and (None in answers or not answers):
            raise Unavailable("a scheduler that may have it does not answer", retry_after=1)
        return max(found, key=_order, default=None)

    async def _answer(self, asking: Awaitable[Claimed]) -> Claimed | None:
        try:
            async with asyncio.timeout(self._timeout):
                return await asking
        except (TimeoutError, Unavailable):
            return None


def _order(claimed: Claimed) -> tuple[bool, int, bool]:
    last = [events[-1].finish_reason for events in claimed.events if events]
    num_tokens = sum(len(event.token_ids) for events in claimed.events for event in events)
    return not {"abort", "error"}.intersection(last), num_tokens, any(last)
