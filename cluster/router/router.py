"""One router: what the routes share.

Owns the tokenizer, the connections to schedulers, what runs in the background and the limit on
calls in flight.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.adapters.records import AdapterRecord, LoadOptions, UnloadResult
from cluster.errors import InvalidRequest, Overloaded, Unavailable
from cluster.messages import Keep
from cluster.request import BASE, Request
from cluster.router.backend import Backend
from cluster.router.background import BackgroundCalls
from cluster.router.bodies.reader import BodyReader
from cluster.router.bodies.weight import weight
from cluster.router.config import RouterConfig
from cluster.router.generation import Generation
from cluster.router.kept_calls import KeptCalls
from cluster.router.metrics.aggregation import MetricsAggregation
from cluster.router.metrics.request_metrics import TASKS, RouterMetrics
from cluster.router.model_resolver import ModelResolver, ResolvedModel
from cluster.router.output_processor import OutputProcessor, TextOptions
from cluster.router.parser.families import (
    REASONING_PARSERS,
    reasoning_parser,
    tool_call_parser,
)
from cluster.router.pooling_config import PoolingConfig
from cluster.router.replica_set import ReplicaSet
from cluster.router.request_log.entry import current_entry
from cluster.router.request_log.writer import RequestLog
from cluster.router.sandbox.grammars import GrammarChecker
from cluster.router.sandbox.request_templates import RequestTemplates
from cluster.router.tenancy.admission import Admission
from cluster.router.tenancy.budget_client import BudgetClient
from cluster.router.tenancy.key_watcher import KeyWatcher
from cluster.router.tenancy.oidc.token_ring import TokenRing
from cluster.router.tokenizer import Tokenizer
from cluster.router.tracing.call_trace import current_trace, phase
from cluster.router.tracing.endpoint import check_endpoint
from cluster.router.uploads import Upload, send
from cluster.supervision import supervise
from cluster.tenancy.shared_room import SharedRoom

if TYPE_CHECKING:
    from cluster.router.tracing.tracer import Tracer

# What is longer is rendered and tokenized in a thread, away from the streams.
INLINE_CHARACTERS = 4096
INLINE_WEIGHT = 512  # of a conversation, with its tools and documents
# Threads that tokenize long texts. Each leaves some memory of its longest behind, and ranks want
# the cores, too.
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
NICENESS = 5  # of these threads alone, on Linux: they hold no lock, and the cores are the ranks'
# Calls to the pool for adapters that lie on its host, which it reads one by one: hundreds at once
# would only keep this loop and the pool's from running streams. What the pool fetches from
# elsewhere may take minutes, and it bounds that itself.
LOADS_AT_ONCE = 4
MEAN_WEIGHT = 0.1  # of the latest call in how long calls take
T = TypeVar("T")


def _tracer(config: RouterConfig, router_id: str) -> "Tracer | None":
    """Return what makes spans of calls, if it is asked for.

    Raises:
        ValueError: if it cannot send them.
    """
    if config.otlp_traces_endpoint is None:
        return None
    check_endpoint(config.otlp_traces_endpoint, os.environ)
    from cluster.router.tracing.tracer import Tracer  # what it needs may not be installed

    return Tracer(config.otlp_traces_endpoint, config.version, router_id)


class Router:
    """The state behind the HTTP API; belongs to one event loop from `start` to `close`."""

    def __init__(self, config: RouterConfig, backend: Backend) -> None:
        """Read what a router needs beside its configuration.

        Raises:
            OSError, ValueError: if the file of API keys, or of rules for tokens, or the request log
                cannot be used.
        """
        self.config = config
        self.backend = backend
        self.router_id = secrets.token_hex(4)  # label of this router's metrics
        self.started_at = int(time.time())
        self.tokenizer = Tokenizer.load(Path(config.model_dir))
        template = self.tokenizer.chat_template
        self.tool_call_parser = tool_call_parser(config.tool_call_parser, template)
        self.reasoning_parser = reasoning_parser(config.reasoning_parser, template)
        self.begins_in_thought = REASONING_PARSERS.get(config.reasoning_parser, False)
        self.metrics = RouterMetrics(config.model_name, config.max_adapter_labels)
        self.keys: KeyWatcher | None = None
        if config.api_key_file is not None:
            self.keys = KeyWatcher(Path(config.api_key_file), self.metrics)
        self.tokens = None if config.oidc is None else TokenRing(config.oidc, self.metrics)
        self.aggregation = MetricsAggregation(
            self.router_id, self.metrics, backend, config.health_timeout
        )
        self.grammars = GrammarChecker(
            Path(config.model_dir), config.vocab_size, config.eos_token_ids
        )
        self.request_templates = RequestTemplates(
            config.model_dir, config.template_timeout, config.retry_after
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="python")
        self._threads = ThreadPoolExecutor(
            NUM_THREADS, "tokenize", initializer=os.nice, initargs=(NICENESS,)
        )
        self._load_turns = asyncio.Semaphore(LOADS_AT_ONCE)
        self.bodies = BodyReader(config.body_memory, config.retry_after)
        self.tracer = _tracer(config, self.router_id)
        self.request_log: RequestLog | None = None
        if config.request_log is not None:
            self.request_log = RequestLog(
                config.request_log,
                self.metrics.log_lines_lost,
                partial(self.tokenizer.decode, skip_special_tokens=False),
            )
        self.models = ModelResolver(config.model_name, backend)
        self.replicas = ReplicaSet(backend, config, self.metrics.used)
        self.kept = KeptCalls(self.replicas, config.health_timeout, self.unique_id)
        self.background = BackgroundCalls()
        self.budgets = BudgetClient(self.router_id, backend.lease, time.monotonic)
        self._room = SharedRoom(config.max_in_flight)  # for answers
        self._mean_seconds = 0.0  # that calls took lately
        self.is_draining = False
        self._must_drain = False  # the others have not been told yet
        self._num_requests = 0
        self._running: tuple[asyncio.Task[None], ...] = ()

    @property
    def num_in_flight(self) -> int:
        """Answers that are being generated."""
        return self._room.num_held

    @cached_property
    def pooling(self) -> PoolingConfig:
        """How embeddings are made of prompts."""
        return PoolingConfig.read(Path(self.config.model_dir))

    async def start(self) -> None:
        """Connect to the schedulers that are up and keep looking for others."""
        if self.request_log is not None:
            self.request_log.start()
        with suppress(Unavailable):
            await self.replicas.refresh()
        background: dict[str, Callable[[], Awaitable[None]]] = {
            "replicas": self.replicas.run,
            "drain": self._follow_drain,
            "metrics": self.aggregation.run,
            "budgets": self.budgets.run,
        }
        if self.keys is not None:
            background["keys"] = self.keys.run
        if self.tokens is not None:
            background["token_rules"] = self.tokens.rules.run
            background["issuer_keys"] = self.tokens.keys.run
        assert background.keys() <= set(TASKS), "metrics tell of all tasks"
        self._running = tuple(
            asyncio.create_task(supervise(name, make, self.metrics.task_failed))
            for name, make in background.items()
        )

    async def close(self) -> None:
        """End all calls and connections."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.background.close()
        await self.request_templates.close()
        await self.grammars.close()
        await self.bodies.close()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._threads.shutdown)
        await self.replicas.close()
        await self.budgets.close()
        await self.aggregation.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        if self.request_log is not None:
            await asyncio.to_thread(self.request_log.close)

    async def drain(self) -> None:
        """Let this and all other routers refuse new calls; those in flight go on.

        Raises:
            Unavailable: if the others cannot be reached; this one refuses nevertheless.
        """
        self.is_draining = self._must_drain = True
        await self.backend.drain()
        self._must_drain = False

    async def _follow_drain(self) -> None:
        """Follow calls to drain the cluster, or to end that, whichever router has got them."""
        while True:
            with suppress(Unavailable):  # the pool is away: it is as it was
                if self._must_drain:
                    await self.drain()
                self.is_draining = await self.backend.is_drained() or self._must_drain
            await asyncio.sleep(self.config.refresh_interval)

    async def encode(
        self, text: str, add_special_tokens: bool, pair: str | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, which may be a pair of texts.

        Raises:
            InvalidRequest: if the text is too long for the context, whatever its tokens are.
        """
        limit = self.config.context_length * self.tokenizer.longest_token
        num_characters = len(text) + len(pair or "")
        if num_characters > limit:
            raise InvalidRequest(
                f"this model's context length is {self.config.context_length} tokens, which a "
                f"prompt of {num_characters} characters cannot fit",
                "prompt",
                "context_length_exceeded",
            )
        with phase("tokenize"):
            if num_characters <= INLINE_CHARACTERS:
                return self.tokenizer.encode(text, add_special_tokens, pair)
            encode = self.tokenizer.encode_aside
            return await _run_in(self._threads, encode, text, add_special_tokens, pair)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of tokens, however many they are; see Tokenizer.decode."""
        return await _run_in(
            self._threads, self.tokenizer.decode_aside, token_ids, skip_special_tokens
        )

    async def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Return a conversation as text; see Tokenizer.render.

        Raises:
            InvalidRequest: as it does, and for a template of a request that takes too much.
            Overloaded: if too many requests with a template of their own wait.
        """
        arguments: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
            "tools": tools,
            "documents": documents,
        }
        with phase("render_template"):
            if chat_template is not None:
                return await self.request_templates.render(
                    {**arguments, "chat_template": chat_template}
                )
            return await self.apart(arguments, partial(self.tokenizer.render, **arguments))

    async def apart(self, of: Any, work: Callable[..., T], *arguments: Any) -> T:
        """Return what comes of Python work that takes as long as what it is of is large.

        One such work at a time: each more would have its share of the interpreter, not the loop.
        """
        if weight(of, INLINE_WEIGHT) <= INLINE_WEIGHT:
            return work(*arguments)
        return await _run_in(self._thread, work, *arguments)

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
        keep: Keep | None = None,
        is_by_token: bool = False,
        admission: Admission | None = None,
    ) -> Generation:
        """Return the context in which the requests of one call run: for each prompt, its choices.

        `arrival` is when the call came, in seconds of `time.monotonic`: latencies count from there.
        With `keep` a call with a single prompt outlives its reader. With `is_by_token` deltas are
        cut as the tokens demand, not as they come. `admission` is what it has taken of limits.
        Entering it raises Overloaded if the router has as many answers in flight as it may, or as
        the tenant may have of them, and Unavailable if it is being drained or no scheduler is up.
        """
        processors = [
            tuple(OutputProcessor(self.tokenizer, request, options) for request in choices)
            for choices in prompts
        ]
        tenant = prompts[0][0].tenant
        metrics = self.metrics.call(
            model.names, [len(choices) for choices in prompts], arrival, tenant
        )
        trace = current_trace()
        if trace is not None:
            trace.resolved(model.names, prompts)
        entry = current_entry()
        if entry is not None:
            entry.resolved(model.names, prompts)
        admit = partial(self._admit, tenant, prompts[0][0].weight)
        return Generation(
            processors,
            self.replicas,
            self.config,
            metrics,
            admit,
            keep,
            is_by_token,
            trace,
            admission,
            entry,
            self.background.read_on,
        )

    async def load(self, name: str, path: str, options: LoadOptions) -> AdapterRecord:
        """Give an adapter a name.

        Raises:
            InvalidRequest: if the base model has the name, or the directory fails a check.
        """
        self._refuse_base_name(name)
        load_inplace, pinned = options.load_inplace, options.pinned
        is_at_pool = Path(path).is_absolute()
        async with self._load_turns if is_at_pool else nullcontext():
            return await self.backend.load(
                name, path, load_inplace, pinned, options.sha256, options.root, options.caller
            )

    async def upload(self, name: str, parts: AsyncIterator[bytes], upload: Upload) -> AdapterRecord:
        """Give an adapter whose weights come in parts a name; raises as `load`."""
        self._refuse_base_name(name)
        return await send(self.backend, name, parts, upload)

    async def load_tensors(
        self, name: str, path: str, config: bytes, options: LoadOptions
    ) -> AdapterRecord:
        """Give a safetensors file in the pool's shared memory a name; raises as `load`."""
        self._refuse_base_name(name)
        async with self._load_turns:
            return await self.backend.load_tensors(name, path, config, options)

    async def unload(self, name: str, force: bool = False) -> UnloadResult:
        """Take a name away; wait until what it stood for is gone, if no other name does.

        The work goes on if the caller is cancelled.

        Raises:
            NotFound: if no adapter has the name.
        """
        result = await self.backend.unload(name, force)
        self.metrics.forget_adapter(name)
        return result

    def _refuse_base_name(self, name: str) -> None:
        if name in (self.config.model_name, BASE):
            raise InvalidRequest(f"{name!r} is the name of the base model", "lora_name")

    def _admit(self, tenant: str, weight: int, count: int) -> Callable[[], None]:
        """Count in the answers of a call; return what counts them out."""
        if self.is_draining:
            self.metrics.rejected("draining")
            raise Unavailable("the cluster is being drained", retry_after=self.config.retry_after)
        room = self._room
        if room.has_room(count) and not room.may_take(tenant, count, weight):
            self.metrics.rejected("tenant_share")
            raise Overloaded(
                f"{room.held_by(tenant)} answers of this tenant are being generated, and {count} "
                f"more would leave too few places for others, of {room.size}",
                retry_after=self._retry_after(count, room.held_by(tenant)),
            )
        if not room.has_room(count):
            self.metrics.rejected("router_in_flight")
            raise Overloaded(
                f"{self.num_in_flight} answers are being generated, and {count} more would be "
                f"over the limit of {self.config.max_in_flight}",
                retry_after=self._retry_after(count, room.num_held),
            )
        room.take(tenant, count, weight)
        entered_at = time.monotonic()
        self.metrics.num_in_flight = self.num_in_flight

        def release() -> None:
            room.give_back(tenant, count)
            self.metrics.num_in_flight = self.num_in_flight
            seconds = time.monotonic() - entered_at
            self._mean_seconds += MEAN_WEIGHT * (seconds - self._mean_seconds)

        return release

    def _retry_after(self, count: int, num_held: int) -> int:
        """Return in how many seconds so many of the places that are held come free, as of late."""
        seconds = self._mean_seconds * count / max(1, num_held)
        return max(self.config.retry_after, ceil(seconds))


async def _run_in(threads: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    """Return what comes of work in a thread, in which the context is the caller's."""
    call = partial(copy_context().run, work, *arguments)
    return await asyncio.get_running_loop().run_in_executor(threads, call)
