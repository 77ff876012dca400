"""A scheduler over one fake rank, without a model: for tests and simulations.

Checks every invariant after every call; the fake rank checks every page that a plan reads.
"""

from msgspec import structs

from cluster.errors import ErrorInfo
from cluster.request import BASE, FinishReason, Request, TokenEvent
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.stats import AdapterLoad, UnloadedAdapter
from worker.protocol import GENESIS, Plan, SamplingParams, StepOutput, encode_plan
from worker.testing.fake_rank import FakeRank


class FakeEngine:
    """Serves requests to their ends and remembers what everyone was told."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        loads_at_once: bool = True,
        plans_ahead: bool = False,
        runs_late: bool = False,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.plans: list[Plan] = []
        self.digest = GENESIS  # end of the chain of plans
        self.events: dict[int, list[TokenEvent]] = {}  # by sequence
        self.begun: list[AdapterLoad] = []  # all loads
        self.loads: list[AdapterLoad] = []  # those that are not answered
        self.unloaded: list[UnloadedAdapter] = []
        self._loads_at_once = loads_at_once
        self._plans_ahead = plans_ahead  # `step` begins the one after it as well, if it can
        self._runs_late = runs_late  # the rank runs a plan when its output is waited for
        self._held_bytes: dict[int, int] = {}  # by slot, on the rank
        self._rank = FakeRank(
            page_size=config.page_size, num_slots=config.num_slots, window=config.window
        )
        self._rank.allocate(config.pages, config.host_pages)
        self._frames: list[bytes] = []  # that the rank has not run
        self._outputs: list[StepOutput] = []  # that are not committed
        self._spoilt: set[int] = set()

    def add(
        self,
        token_ids: tuple[int, ...],
        max_tokens: int = 4,
        adapter: str = BASE,
        *,
        salt: str = "",
        sampling: SamplingParams | None = None,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        tenant: str = "",
        weight: int = 1,
        adapter_bytes: int = 0,
    ) -> int:
        """Queue a request and return its sequence number; raises what `Scheduler.add` does."""
        request = Request(
            request_id=f"r{len(self.events) + 1}",
            adapter=adapter,
            token_ids=token_ids,
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            weight=weight,
            adapter_bytes=adapter_bytes,
        )
        return self.add_all((request,))[0]

    def add_choices(
        self,
        token_ids: tuple[int, ...],
        count: int,
        max_tokens: int = 4,
        adapter: str = BASE,
        tenant: str = "",
    ) -> list[int]:
        """Queue the choices of one prompt with seeds 0, 1, 2, ... and return their numbers."""
        return self.add_all(
            tuple(
                Request(
                    request_id=f"r{len(self.events) + 1 + seed}",
                    adapter=adapter,
                    token_ids=token_ids,
                    sampling=SamplingParams(seed=seed),
                    max_tokens=max_tokens,
                    tenant=tenant,
                )
                for seed in range(count)
            )
        )

    def add_all(self, requests: tuple[Request, ...]) -> list[int]:
        """Queue the choices of one prompt; raises what `Scheduler.add_all` does."""
        seq_ids = self.scheduler.add_all(requests)
        self.events.update((seq_id, []) for seq_id in seq_ids)
        self.scheduler.check()
        return seq_ids

    def begin_step(self) -> Plan | None:
        """Schedule a step and send it to the rank, but do not commit; None: nothing to do."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self._take_unloaded()
        for load in self.scheduler.take_loads():
            self.begun.append(load)
            self.loads.append(load)
            for slot, adapter in load.clears:
                self._clear(slot, adapter)
        if plan is not None:
            self.plans.append(plan)
            frame, self.digest = encode_plan(plan, self.digest)
            self._frames.append(frame)
            if not self._runs_late:
                self._run_next()
        return plan

    def end_step(self) -> None:
        """Commit the oldest step that was begun."""
        assert self.num_in_flight, "no step was begun"
        if not self._outputs:
            self._run_next()
        self._take(self.scheduler.commit(self._outputs.pop(0)))

    @property
    def num_in_flight(self) -> int:
        """Steps begun and not committed."""
        return len(self._frames) + len(self._outputs)

    def _run_next(self) -> None:
        output = self._rank.step(self._frames.pop(0)).output
        assert output is not None, "the only rank answers every plan"
        tokens = tuple(token for token in output.tokens if token.seq_id not in self._spoilt)
        failed = tuple(token.seq_id for token in output.tokens if token.seq_id in self._spoilt)
        failed += output.failed
        self._outputs.append(structs.replace(output, tokens=tokens, failed=failed))

    def spoil(self, seq_id: int) -> None:
        """Let the logits of a sequence not be finite in all steps that the rank runs from now."""
        self._spoilt.add(seq_id)

    def step(self) -> Plan | None:
        """Run one step, and answer its loads if they come at once; None: nothing was to do."""
        begins = self.num_in_flight == 0 or (self._plans_ahead and self.num_in_flight == 1)
        while begins and self.begin_step() is not None:
            begins = self._plans_ahead and self.num_in_flight == 1
        plan = self.plans[-self.num_in_flight] if self.num_in_flight else None
        if plan is not None:
            self.end_step()
        if self._loads_at_once:
            while self.loads:
                self.finish_load()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if self.step() is None and self.is_idle:
                return
        raise AssertionError(f"work is left after {max_steps} steps")

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        stats = self.scheduler.stats()
        return not (stats.num_waiting or stats.num_running)

    def finish_load(self) -> str:
        """Complete the load that was begun first and return its adapter."""
        load = self.loads.pop(0)
        stats = self.scheduler.stats()
        self._rank.load_adapter(load.slot, load.adapter)
        (claimed,) = (one.claimed_bytes for one in stats.slots if one.slot == load.slot)
        self._held_bytes[load.slot] = claimed
        held = sum(self._held_bytes.values())
        assert not stats.adapter_memory or held <= stats.adapter_memory, f"{held} bytes are held"
        self.scheduler.adapter_ready(load.adapter)
        self.scheduler.check()
        return load.adapter

    def fail_load(self, error: ErrorInfo) -> str:
        """Fail the load that was begun first and return its adapter."""
        load = self.loads.pop(0)
        self._take(self.scheduler.adapter_failed(load.adapter, error))
        if load.replaces is not None:
            self._clear(load.slot, load.replaces)
        return load.adapter

    def bank(self) -> list[str | None]:
        """Return what the rank holds in each slot."""
        return self._rank.bank()

    def abort(self, seq_id: int) -> None:
        """Abort a sequence."""
        self.scheduler.abort(seq_id)
        self.scheduler.check()

    def expire(self, seq_id: int) -> None:
        """Let the deadline of a sequence pass."""
        self._take(self.scheduler.expire(seq_id))

    def unload(self, adapter: str, *, force: bool = False) -> None:
        """Begin to unload an adapter."""
        self._take(self.scheduler.unload(adapter, force=force))

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        """Return the tokens that a sequence was sent so far."""
        return tuple(token for event in self.events[seq_id] for token in event.token_ids)

    def finish_reason(self, seq_id: int) -> FinishReason | None:
        """Return why a sequence has ended."""
        events = self.events[seq_id]
        return events[-1].finish_reason if events else None

    def num_cached_tokens(self, seq_id: int) -> int:
        """Return what the first event of a sequence said of the prefix cache."""
        return self.events[seq_id][0].num_cached_tokens

    def _take(self, events: list[tuple[int, TokenEvent]]) -> None:
        for seq_id, event in events:
            self.events[seq_id].append(event)
        self._take_unloaded()
        self.scheduler.check()

    def _take_unloaded(self) -> None:
        for gone in self.scheduler.take_unloaded():
            self.unloaded.append(gone)
            for slot, adapter in gone.freed_slots:
                self._clear(slot, adapter)

    def _clear(self, slot: int, adapter: str) -> None:
        self._rank.clear_slot(slot, adapter)
        self._held_bytes[slot] = 0
