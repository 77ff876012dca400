"""The requests of one call while schedulers run them.

Each is aborted exactly once if it has not ended when the call is left, whether by a stop string, an
error or a client that went away.
"""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from cluster.errors import Internal, TopworkError
from cluster.request import TokenEvent, error_from
from cluster.router.engine_client import EngineClient, EventQueue
from cluster.router.metrics.request_metrics import CallMetrics
from cluster.router.output_processor import CompletionOutput, OutputProcessor
from cluster.router.replica_set import ReplicaSet


class Generation:
    """A context: on entry all requests are submitted, on exit none is left running."""

    def __init__(
        self,
        prompts: Sequence[tuple[OutputProcessor, ...]],
        replicas: ReplicaSet,
        metrics: CallMetrics,
        admit: Callable[[int], Callable[[], None]],
    ) -> None:
        self.prompts = prompts  # the choices of each
        self.processors = tuple(processor for choices in prompts for processor in choices)
        self._replicas = replicas
        self._metrics = metrics
        self._admit = admit  # counts requests in; returns what counts them out
        self._release: Callable[[], None] | None = None
        self._queue = EventQueue()
        self._clients: dict[int, EngineClient] = {}  # by index of the running requests
        self._error: TopworkError | None = None
        self._index_by_id = {
            processor.request.request_id: index for index, processor in enumerate(self.processors)
        }

    def __enter__(self) -> "Generation":
        self._release = self._admit(len(self.processors))
        try:
            for choices in self.prompts:
                requests = tuple(processor.request for processor in choices)
                client = self._replicas.choose(requests[0])
                client.submit(requests, self._queue)
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

    async def receive(self) -> list[tuple[int, CompletionOutput]]:
        """Wait for events; return (index of the request, delta) in order of arrival, maybe none.

        Raises:
            TopworkError: what a scheduler reports for any of the requests, after all the deltas
                that came before it have been returned.
        """
        deltas: list[tuple[int, CompletionOutput]] = []
        if self._error is None:
            for event in await self._queue.get():
                index = self._index_by_id[event.request_id]
                if index not in self._clients:  # ended by a stop string before this event
                    continue
                if event.finish_reason == "error":
                    self._fail(index, event)
                    break
                delta = self._process(index, event)
                if delta is not None:
                    deltas.append((index, delta))
        if self._error is not None and not deltas:
            raise self._error
        return deltas

    def broke_off(self) -> None:
        """Note that a stream ended with an error after it had begun."""
        self._metrics.broke_off()

    def _fail(self, index: int, event: TokenEvent) -> None:
        del self._clients[index]
        self._error = (
            Internal("the scheduler gave no reason for the failure of the request")
            if event.error is None
            else error_from(event.error)
        )

    def _process(self, index: int, event: TokenEvent) -> CompletionOutput | None:
        processor = self.processors[index]
        delta = processor.process(event)
        self._metrics.tokens(index, len(event.token_ids))
        if processor.finish_reason is not None:
            client = self._clients.pop(index)
            client.abort(processor.request.request_id)  # where a stop string ended it
            self._metrics.finished(index, processor)
        return delta

    def _leave(self) -> None:
        for index, client in self._clients.items():
            client.abort(self.processors[index].request.request_id)
        self._clients.clear()
        assert self._release is not None, "left without being entered"
        self._release()
