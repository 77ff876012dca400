"""One router: what the routes share, and the generation of one call's answers.

Owns the tokenizer, the connections to schedulers and the limit on calls in flight. Each request of
a call is aborted exactly once if it has not ended when the call is left, whether by a stop string,
an error or a client that went away.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.adapters.records import AdapterRecord, UnloadResult
from cluster.errors import (
    Internal,
    InvalidRequest,
    Overloaded,
    TopworkError,
    Unavailable,
    error_from,
)
from cluster.request import BASE, Request, TokenEvent
from cluster.router.backend import Backend
from cluster.router.config import RouterConfig
from cluster.router.engine_client import EngineClient, EventQueue
from cluster.router.load_balancer import ReplicaSet
from cluster.router.metrics.aggregation import MetricsAggregation
from cluster.router.metrics.request_metrics import CallMetrics, RouterMetrics
from cluster.router.model_resolver import ModelResolver, ResolvedModel
from cluster.router.output_processor import CompletionOutput, OutputProcessor, TextOptions
from cluster.router.tokenizer import Tokenizer

# What is longer is rendered and tokenized in a thread, away from the streams.
INLINE_CHARACTERS = 4096
INLINE_MESSAGES = 64


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


class Router:
    """The state behind the HTTP API; belongs to one event loop from `start` to `close`."""

    def __init__(self, config: RouterConfig, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.router_id = secrets.token_hex(4)  # label of this router's metrics
        self.started_at = int(time.time())
        self.tokenizer = Tokenizer.load(Path(config.model_dir))
        self.metrics = RouterMetrics(config.model_name, config.max_adapter_labels)
        self.aggregation = MetricsAggregation(
            self.router_id, self.metrics, backend, config.health_timeout
        )
        self.models = ModelResolver(config.model_name, backend)
        self.replicas = ReplicaSet(backend, config)
        self.is_draining = False
        self.num_in_flight = 0  # answers
        self._num_requests = 0
        self._running: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        """Connect to the schedulers that are up and keep looking for others."""
        with suppress(Unavailable):
            await self.replicas.refresh()
        self._running = (
            asyncio.create_task(self._run()),
            asyncio.create_task(self.aggregation.run()),
        )

    async def close(self) -> None:
        """End all calls and connections."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.replicas.close()
        await self.aggregation.close()

    async def drain(self) -> None:
        """Let this and all other routers refuse new calls; those in flight go on.

        Raises:
            Unavailable: if the others cannot be reached; this one refuses nevertheless.
        """
        self.is_draining = True
        await self.backend.drain()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.replicas.run())
            tasks.create_task(self._follow_drain())

    async def _follow_drain(self) -> None:
        """Follow calls to drain the cluster that other routers have got."""
        while not self.is_draining:
            with suppress(Unavailable):  # the pool is away: no router can drain the cluster
                self.is_draining = await self.backend.is_drained() or self.is_draining
            await asyncio.sleep(self.config.refresh_interval)

    async def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a prompt.

        Raises:
            InvalidRequest: if the text is too long for the context, whatever its tokens are.
        """
        limit = self.config.context_length * self.tokenizer.longest_token
        if len(text) > limit:
            raise InvalidRequest(
                f"this model's context length is {self.config.context_length} tokens, which a "
                f"prompt of {len(text)} characters cannot fit",
                "prompt",
                "context_length_exceeded",
            )
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def render(
        self,
        messages: list[dict[str, str]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """Return a conversation as text; see Tokenizer.render."""
        arguments = (messages, add_generation_prompt, continue_final_message, variables)
        if len(messages) <= INLINE_MESSAGES:
            return self.tokenizer.render(*arguments)
        return await asyncio.to_thread(self.tokenizer.render, *arguments)

    def unique_id(self, request_id: str) -> str:
        """Return an id for the wire: the client's own may come twice."""
        self._num_requests += 1
        return f"{request_id}-{self._num_requests}"

    def generate(
        self,
        model: ResolvedModel,
        prompts: Sequence[tuple[Request, ...]],
        options: TextOptions,
        arrival: float,
    ) -> Generation:
        """Return the context in which the requests of one call run: for each prompt, its choices.

        `arrival` is when the call came, in seconds of `time.monotonic`: latencies count from there.
        Entering it raises Overloaded if the router has as many answers in flight as it may, and
        Unavailable if it is being drained or no scheduler is up.
        """
        processors = [
            tuple(OutputProcessor(self.tokenizer, request, options) for request in choices)
            for choices in prompts
        ]
        metrics = self.metrics.call(model.names, [len(choices) for choices in prompts], arrival)
        return Generation(processors, self.replicas, metrics, self._admit)

    async def load(self, name: str, path: str, load_inplace: bool, pinned: bool) -> AdapterRecord:
        """Give an adapter directory a name.

        Raises:
            InvalidRequest: if the base model has the name, or the directory fails a check.
        """
        if name in (self.config.model_name, BASE):
            raise InvalidRequest(f"{name!r} is the name of the base model", "lora_name")
        return await self.backend.load(name, path, load_inplace, pinned)

    async def unload(self, name: str, force: bool = False) -> UnloadResult:
        """Take a name away; wait until what it stood for is gone, if no other name does.

        The work goes on if the caller is cancelled.

        Raises:
            NotFound: if no adapter has the name.
        """
        result = await self.backend.unload(name, force)
        self.metrics.forget_adapter(name)
        return result

    def _admit(self, count: int) -> Callable[[], None]:
        """Count in the answers of a call; return what counts them out."""
        if self.is_draining:
            self.metrics.rejected("draining")
            raise Unavailable("the cluster is being drained", retry_after=self.config.retry_after)
        if self.num_in_flight + count > self.config.max_in_flight:
            self.metrics.rejected("router_in_flight")
            raise Overloaded(
                f"{self.num_in_flight} answers are being generated, and {count} more would be "
                f"over the limit of {self.config.max_in_flight}",
                retry_after=self.config.retry_after,
            )
        self.num_in_flight += count
        self.metrics.num_in_flight = self.num_in_flight

        def release() -> None:
            self.num_in_flight -= count
            self.metrics.num_in_flight = self.num_in_flight

        return release
