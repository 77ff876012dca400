"""Our scheduler with a stub for the ranks: every sampling chunk gets the same token at once.

It reports what is cached to a feed of KV events, as a server's always does. Nobody reads the feed,
so its events are gathered, and dropped after each step.
"""

import gc
from collections.abc import Sequence
from importlib import import_module
from time import perf_counter, time

from cluster.engine.kv_event_feed import KvEventFeed
from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.scheduler import Scheduler
from tests.bench.scheduler.cases import NUM_SLOTS
from tests.bench.scheduler.core import PAGE_SIZE, CoreSizes, Spent
from worker.protocol import GENESIS, SampledToken, SamplingParams, StepOutput, encode_plan

TOKEN = 7
BASE_DIGEST = "base model"


def load_production_heap() -> None:
    """Import what a scheduler's process has imported, and freeze it as that process does."""
    import_module("ray.serve")
    import_module("cluster.engine.engine")
    gc.collect()
    gc.freeze()


class OurCore:
    """Drives `Scheduler` as an engine does; adapters are loaded as soon as asked for."""

    def __init__(self, sizes: CoreSizes) -> None:
        self.spent = Spent()
        self._kv_feed = KvEventFeed(BASE_DIGEST, time)
        self._kv_feed.clear()
        self._scheduler = Scheduler(
            SchedulerConfig(
                base_digest=BASE_DIGEST,
                num_pages=sizes.num_pages,
                page_size=PAGE_SIZE,
                max_model_len=sizes.num_pages * PAGE_SIZE,
                num_slots=NUM_SLOTS,
                max_running=sizes.max_running,
                token_budget=sizes.token_budget,
                max_chunk=sizes.token_budget,
            ),
            self._kv_feed.observer,
        )
        self._digest = GENESIS
        self._num_active = 0

    @property
    def num_active(self) -> int:
        """Requests that wait or run."""
        return self._num_active

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing, not even something cached."""
        return self._scheduler.stats().free_pages

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int, adapter: str | None = None
    ) -> None:
        """Take a request in."""
        token_ids = tuple(prompt)  # a message decodes to a tuple
        begun = perf_counter()
        self._scheduler.add(Request(name, adapter or BASE, token_ids, SamplingParams(), max_tokens))
        self.spent.add += perf_counter() - begun
        self._num_active += 1

    def step(self) -> int:
        """Run one step; return how many prompt tokens it found in the cache."""
        scheduler = self._scheduler
        begun = perf_counter()
        plan = scheduler.schedule()
        loads = scheduler.take_loads()
        scheduler.take_unloaded()
        for load in loads:
            scheduler.adapter_ready(load.adapter)
        planned = perf_counter()
        if plan is None:
            assert loads, "nothing can make progress"
            self.spent.add_step(planned - begun, 0.0, 0.0)
            return 0
        _, self._digest = encode_plan(plan, self._digest)
        tokens = tuple([SampledToken(c.seq_id, TOKEN) for c in plan.chunks if c.samples])
        output = StepOutput(plan.step, tokens)
        handed = perf_counter()
        events = scheduler.commit(output)
        self._kv_feed.flush()
        done = perf_counter()
        self.spent.add_step(planned - begun, handed - planned, done - handed)
        self._num_active -= sum(event.finish_reason is not None for _, event in events)
        return sum(start.num_cached_tokens for start in plan.starts)
