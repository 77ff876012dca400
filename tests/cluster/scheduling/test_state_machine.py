"""Any order of calls keeps every invariant, and every answer is what it would be alone."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cluster.errors import NotFound, Overloaded
from cluster.request import BASE, ErrorInfo
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.fake_engine import FakeEngine
from worker.fake_rank import fake_continuation

ADAPTERS = st.sampled_from([BASE, "A", "B", "C", "D"])
GONE = ErrorInfo("NotFound", "gone")


class Serving(RuleBasedStateMachine):
    """Random clients of a scheduler with tiny pools; the engine checks after every call."""

    @initialize(
        num_pages=st.integers(5, 14),
        num_slots=st.integers(1, 3),
        max_running=st.integers(1, 5),
        spare=st.integers(0, 9),
        patience=st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        num_pages: int,
        num_slots: int,
        max_running: int,
        spare: int,
        patience: int,
        prefix_cache: bool,
    ) -> None:
        config = SchedulerConfig(
            base_digest="model",
            num_pages=num_pages,
            page_size=2,
            max_model_len=24,
            num_slots=num_slots,
            max_running=max_running,
            max_waiting=12,
            token_budget=max_running + 2 + spare,
            max_chunk=4,
            slot_patience=patience,
            drain_steps=2,
            prefix_cache=prefix_cache,
        )
        self.engine = FakeEngine(config, loads_at_once=False)
        self.limit = config.token_limit
        self.expected: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self.is_stepping = False

    @rule(
        fork=st.integers(0, 7),
        tail=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 12),
        adapter=ADAPTERS,
        salt=st.sampled_from(["", "A"]),
    )
    def add(self, fork: int, tail: list[int], max_tokens: int, adapter: str, salt: str) -> None:
        prompt = (*range(fork), *tail, 1)[: self.limit - 1]
        try:
            seq_id = self.engine.add(prompt, max_tokens, adapter, salt=salt)
        except (NotFound, Overloaded):
            return
        digest = None if adapter == BASE else adapter
        num_tokens = min(max_tokens, self.limit - len(prompt))
        self.expected[seq_id] = fake_continuation(digest, prompt, num_tokens)

    @rule(back=st.integers(0, 8))
    def abort(self, back: int) -> None:
        seq_id = len(self.expected) - back
        if seq_id in self.expected and self.engine.finish_reason(seq_id) is None:
            self.aborted.add(seq_id)
        self.engine.abort(seq_id)

    @precondition(lambda self: not self.is_stepping)
    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: not self.is_stepping)
    @rule()
    def begin_step(self) -> None:
        self.is_stepping = self.engine.begin_step() is not None

    @precondition(lambda self: self.is_stepping)
    @rule()
    def end_step(self) -> None:
        self.engine.end_step()
        self.is_stepping = False

    @precondition(lambda self: self.engine.loads)
    @rule()
    def finish_load(self) -> None:
        self.engine.finish_load()

    @precondition(lambda self: self.engine.loads)
    @rule()
    def fail_load(self) -> None:
        digest = self.engine.fail_load(GONE)
        for seq_id in self.expected:
            events = self.engine.events[seq_id]
            if events and events[-1].error == GONE:
                self.expected[seq_id] = self.engine.tokens(seq_id)
        assert digest != BASE

    @rule(adapter=ADAPTERS.filter(lambda a: a != BASE))
    def unload(self, adapter: str) -> None:
        self.engine.unload(adapter)

    @rule(adapter=ADAPTERS.filter(lambda a: a != BASE), pins=st.booleans())
    def allow_or_unpin(self, adapter: str, pins: bool) -> None:
        self.engine.scheduler.allow(adapter)
        if pins and self.engine.scheduler.stats().num_slots > 1:
            self.engine.scheduler.pin("A")
        else:
            self.engine.scheduler.unpin("A")
        self.engine.scheduler.check()

    def teardown(self) -> None:
        """Let everything end: progress, the right tokens, and every page back."""
        if not hasattr(self, "engine"):
            return
        if self.is_stepping:
            self.engine.end_step()
        for _ in range(4000):
            if self.engine.step() is None and self.engine.is_idle and not self.engine.loads:
                break
            while self.engine.loads:
                self.engine.finish_load()
        stats = self.engine.scheduler.stats()
        assert self.engine.is_idle, "work is left, and no progress"
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        assert all(slot.leases == 0 for slot in stats.slots)
        for seq_id, tokens in self.expected.items():
            sent = self.engine.tokens(seq_id)
            assert sent == (tokens[: len(sent)] if seq_id in self.aborted else tokens)


Serving.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
test_any_order_of_calls_keeps_every_invariant = Serving.TestCase
