"""The answers of one call while schedulers make them.

Owns the requests of the call: each is aborted exactly once if it has not ended when the call is
left, whether by a stop string, an error or a client that went away. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from cluster.errors import Internal, TopworkError
from cluster.request import TokenEvent
from cluster.router.engine_client import EngineClient
from cluster.router.error_responses import from_wire
from cluster.router.event_queue import EventQueue
from cluster.router.metrics.request_metrics import CallMetrics
from cluster.router.output_processor import OutputDelta, OutputProcessor
from cluster.router.replica_set import ReplicaSet


class Generation:
    """A context: on entry all requests are submitted, on exit none is left running."""

    def __init__(
        self,
        prompts: Sequence[tuple[OutputProcessor, ...]],
        schedulers: ReplicaSet,
        metrics: CallMetrics,
        admit: Callable[[int], Callable[[], None]],
    ) -> None:
        self.prompts = prompts  # the answers to each
        self.answers = tuple(answer for answers in prompts for answer in answers)
        self._schedulers = schedulers
        self._metrics = metrics
        self._admit = admit  # takes places in the router; returns what gives them back
        self._release: Callable[[], None] | None = None
        self._mailbox = EventQueue()
        self._clients: dict[int, EngineClient] = {}  # by index of the running requests
        self._error: TopworkError | None = None
        self._index_by_id = {
            answer.request.request_id: index for index, answer in enumerate(self.answers)
        }

    def __enter__(self) -> "Generation":
        self._release = self._admit(len(self.answers))
        try:
            for answers in self.prompts:
                requests = tuple(answer.request for answer in answers)
                client = self._schedulers.choose(requests[0])
                client.submit(requests, self._mailbox)
                for request in requests:
                    self._clients[self._index_by_id[request.request_id]] = client
        except TopworkError as error:
            self._metrics.failed(error)
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit):
            self._metrics.disconnected()
        elif error is not None:
            self._metrics.failed(error)
        self._leave()

    @property
    def is_running(self) -> bool:
        """Whether there is more to receive."""
        return bool(self._clients) or self._error is not None

    async def receive(self) -> list[tuple[int, OutputDelta]]:
        """Wait for news; return (index of the answer, piece) in order of arrival, maybe none.

        Raises:
            TopworkError: what a scheduler reports for any of the requests, after all the pieces
                that came before it have been returned.
        """
        pieces: list[tuple[int, OutputDelta]] = []
        if self._error is None:
            for event in await self._mailbox.receive():
                index = self._index_by_id[event.request_id]
                if index not in self._clients:  # ended by a stop string before this event
                    continue
                if event.finish_reason == "error":
                    self._fail(index, event)
                    break
                piece = self._advance(index, event)
                if piece is not None:
                    pieces.append((index, piece))
        if self._error is not None and not pieces:
            raise self._error
        return pieces

    def broke_off(self) -> None:
        """Note that a stream has told its reader of an error after it had begun."""
        self._metrics.broke_off()

    def _fail(self, index: int, event: TokenEvent) -> None:
        del self._clients[index]
        self._error = (
            Internal("the scheduler gave no reason for the failure of the request")
            if event.error is None
            else from_wire(event.error)
        )

    def _advance(self, index: int, event: TokenEvent) -> OutputDelta | None:
        answer = self.answers[index]
        piece = answer.advance(event)
        self._metrics.tokens(index, len(event.token_ids))
        if answer.finish_reason is not None:
            client = self._clients.pop(index)
            client.abort(answer.request.request_id)  # where a stop string ended it
            self._metrics.finished(index, answer)
        return piece

    def _leave(self) -> None:
        for index, client in self._clients.items():
            client.abort(self.answers[index].request.request_id)
        self._clients.clear()
        assert self._release is not None, "left without being entered"
        self._release()
