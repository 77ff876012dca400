"""Where the time of a step goes: `topwork bench --engine TP --profile`.

Owns which function of the engine stands for which part. They are wrapped while it measures, so that
the engine itself looks at no clock. Everything runs in this process: what transport, HTTP and Ray
cost is the difference between a server and this.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table

import deploy.local_engine
import worker.engine.rank
import worker.runners.model_runner
import worker.runners.native_runner
from cluster.scheduler.scheduler import Scheduler
from deploy.local_engine import LocalEngine
from kernels.native.backend import NativeKernels
from kernels.native.program import Program, Step, ThreadPool
from worker.cache.kv_cache import KVCache
from worker.engine.sequences import SequenceTable
from worker.models.decoder import Model
from worker.protocol import Plan
from worker.sampling.sampler import Sampler

OTHER = "everything else"
_HEAD = "final norm and lm_head"
_Part = tuple[str, Any, str]
_OF_SCHEDULER: tuple[_Part, ...] = (
    ("scheduler: commit", Scheduler, "commit"),
    ("plan: encode", deploy.local_engine, "encode_plan"),
)
_OF_RANKS: tuple[_Part, ...] = (
    ("plan: decode and check", worker.engine.rank, "decode_plan"),
    ("batch: sequences", SequenceTable, "apply"),
    ("batch: page copies", KVCache, "copy"),
    ("batch: page clearing", KVCache, "clear"),
    ("batch: rows", worker.engine.rank, "build_input_batch"),
    ("batch: tensors", worker.runners.native_runner, "cpu_forward_batch"),
    ("batch: tensors", worker.runners.model_runner, "cpu_forward_batch"),
    ("embedding", Model, "embed"),
    ("embedding", NativeKernels, "look_up"),
    (_HEAD, Model, "logits"),
    ("sampling", Sampler, "sample"),
    ("sampling", worker.engine.rank, "build_step_output"),
)


@dataclass(slots=True)
class Times:
    """The steps of one kind; parts of ranks are means over them."""

    num_steps: int = 0
    total: float = 0.0  # seconds
    parts: dict[str, float] = field(default_factory=dict)  # seconds

    def rows(self) -> list[tuple[str, float]]:
        """Return the parts in milliseconds of a step, the largest first, what is left last."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        parts.append((OTHER, self.total - sum(self.parts.values())))
        return [(name, 1000 * seconds / self.num_steps) for name, seconds in parts]


class StepProfile:
    """Takes the times of an engine's steps, decodes apart from those that compute prompts."""

    def __init__(self, tp: int) -> None:
        self.decodes = Times()
        self.prefills = Times()
        self._tp = tp
        self._lock = Lock()  # ranks are threads
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._plan: Plan | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all steps that an engine of this process runs meanwhile."""
        with ExitStack() as stack:
            for name, owner, function in _OF_SCHEDULER:
                stack.enter_context(wrapped(owner, function, self._timed(name, 1.0)))
            for name, owner, function in _OF_RANKS:
                stack.enter_context(wrapped(owner, function, self._timed(name, 1 / self._tp)))
            stack.enter_context(wrapped(Scheduler, "schedule", self._planned))
            stack.enter_context(wrapped(ThreadPool, "run", self._program))
            stack.enter_context(wrapped(LocalEngine, "step", self._stepped))
            yield

    def _add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._parts[name] += seconds

    def _timed(self, name: str, share: float) -> Callable[[Callable[..., Any]], Any]:
        """Return a wrapper that adds its calls' time to a part."""

        def wrap(inner: Callable[..., Any]) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                begin = time.perf_counter()
                result = inner(*arguments, **options)
                self._add(name, share * (time.perf_counter() - begin))
                return result

            return call

        return wrap

    def _planned(self, inner: Callable[..., Any]) -> Any:
        timed = self._timed("scheduler: schedule", 1.0)(inner)

        def schedule(*arguments: Any) -> Plan | None:
            self._plan = timed(*arguments)
            return self._plan

        return schedule

    def _program(self, inner: Callable[..., Any]) -> Any:
        def run(
            thread_pool: ThreadPool, program: Program, step: Step, *, alone: bool = False
        ) -> None:
            if len(program.names) == 1:  # not a recorded one: its caller's part counts it
                inner(thread_pool, program, step, alone=alone)
                return
            thread_pool.seconds = defaultdict(float)
            inner(thread_pool, program, step, alone=alone)
            for name, seconds in thread_pool.seconds.items():
                self._add(f"op: {name}", seconds / self._tp)
            thread_pool.seconds = None

        return run

    def _stepped(self, inner: Callable[..., Any]) -> Any:
        def step(engine: LocalEngine) -> bool:
            self._parts.clear()
            begin = time.perf_counter()
            has_run: bool = inner(engine)
            took = time.perf_counter() - begin
            if self._plan is not None and self._plan.chunks:
                only_decodes = all(len(chunk.token_ids) == 1 for chunk in self._plan.chunks)
                times = self.decodes if only_decodes else self.prefills
                times.num_steps += 1
                times.total += took
                for name, seconds in self._parts.items():
                    times.parts[name] = times.parts.get(name, 0.0) + seconds
            return has_run

        return step


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Put a wrapper in the place of a function of a class or module, for a while."""
    inner = getattr(owner, name)
    setattr(owner, name, wrap(inner))
    try:
        yield
    finally:
        setattr(owner, name, inner)


def print_profile(title: str, profile: StepProfile, console: Console) -> None:
    """Print where the time of both kinds of steps went."""
    for kind, times in (("prompts", profile.prefills), ("decode", profile.decodes)):
        if not times.num_steps:
            continue
        mean = 1000 * times.total / times.num_steps
        table = Table(title=f"{title}: {times.num_steps} steps with {kind}, {mean:.2f} ms each")
        table.add_column("part")
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for name, milliseconds in times.rows():
            table.add_row(name, f"{milliseconds:.3f}", f"{milliseconds / mean:.1%}")
        console.print(table)
