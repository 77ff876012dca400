"""tokenspeed-scheduler with a stub for its executor; runs in the environment that has it.

It keeps no adapters apart, so it takes requests to the base model only. It reserves the pages of
all output tokens when it takes a request in; ours takes each page when it is needed.
"""

from collections.abc import Sequence
from importlib import import_module
from time import perf_counter

from tests.bench.scheduler.core import PAGE_SIZE, CoreSizes, Spent

TOKEN = 7
GROUP = "full"


class PeerCore:
    """Drives the C++ core as its own executor does: no host tier, its KV events read each step."""

    def __init__(self, sizes: CoreSizes) -> None:
        self.spent = Spent()
        self._api = api = import_module("tokenspeed_scheduler")
        config = api.SchedulerConfig()
        num_pages = sizes.num_pages + 1  # its page 0 is never given out
        config.cache_groups = [api.CacheGroupConfig(GROUP, PAGE_SIZE, num_pages, api.AttnKind.Full)]
        config.num_device_pages = num_pages
        config.num_host_pages = config.num_snapshot_pages = 1  # 0 is refused
        config.disable_l2_cache = True
        config.enable_kv_cache_events = True
        config.prefix_granularity = PAGE_SIZE
        config.max_batch_size = sizes.max_running
        config.max_scheduled_tokens = sizes.token_budget
        config.enable_mixed_prefill_decode = True
        self._scheduler = api.Scheduler(config)
        self._tokens_left: dict[str, int] = {}

    @property
    def num_active(self) -> int:
        """Requests that wait or run."""
        return len(self._tokens_left)

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing, not even something cached."""
        free: int = self._scheduler.empty_lcm_blocks()
        return free

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int, adapter: str | None = None
    ) -> None:
        """Take a request in."""
        assert adapter is None, "this scheduler has no adapters"
        token_ids = list(prompt)
        begun = perf_counter()
        spec = self._api.RequestSpec()
        spec.request_id, spec.tokens, spec.max_new_tokens = name, token_ids, max_tokens
        self._scheduler.submit_requests([spec])
        self.spent.add += perf_counter() - begun
        self._tokens_left[name] = max_tokens

    def step(self) -> int:
        """Run one step; return how many prompt tokens it found in the cache."""
        api, left = self._api, self._tokens_left
        begun = perf_counter()
        plan = self._scheduler.next_execution_plan()
        planned = perf_counter()
        event, found, ended = api.ExecutionEvent(), 0, []
        for batch in plan.forward:
            found += sum(batch.extend_prefix_lens)
            batch.block_tables_arrays()
            for name in batch.request_ids:
                result = api.ForwardEvent.ExtendResult()
                result.request_id, result.tokens = name, [TOKEN]
                event.add_event(result)
                left[name] -= 1
                if not left[name]:
                    finish = api.ForwardEvent.Finish()
                    finish.request_id = name
                    event.add_event(finish)
                    ended.append(name)
        handed = perf_counter()
        self._scheduler.advance(event)
        self._scheduler.drain_kv_events()
        done = perf_counter()
        self.spent.add_step(planned - begun, handed - planned, done - handed)
        for name in ended:
            del left[name]
        return found
