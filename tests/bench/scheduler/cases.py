"""The workloads: the same requests in the same order for every scheduler.

Each proves that it measured what it says: that a hit was a hit, that what is blocked stayed so.
Standard library only, as `core`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal

from tests.bench.scheduler.core import PAGE_SIZE, Core, CoreSizes, OpenCore, Sample, sample

Kind = Literal[
    "decode",
    "miss",
    "hit",
    "evict",
    "context",
    "cached pages",
    "adapters",
    "slot turns",
    "pages held",
    "batch full",
]

VOCAB_SIZE = 32000
CONTEXT = 128  # prompt tokens of a decoding sequence, if nothing else is said
FULL_POOL = 4096  # pages, all cached when the requests come that evict
FILL = 1024  # tokens of each prompt that fills a cache; half of what a measured one has is in it
NUM_HOT = 4  # prefixes that are used again and again while the rest is evicted
NUM_SLOTS = 8  # adapters resident at once
MAX_ROUNDS = 30  # for which the pages of a kept scheduler are enough, the warm-up among them
BATCH = 64  # decodes, if nothing else is said; over all resident adapters
BLOCKED = 100_000  # tokens of the longest prompt that waits while nothing of it can be computed
LOCKED_CONTEXT = 1600  # of decodes that hold, together, as many pages as that prompt needs


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the result."""

    kind: Kind
    size: int  # sequences, tokens, tokens that wait, cached pages or registered adapters
    repeats: int  # steps or requests measured in a round

    @property
    def name(self) -> str:
        """What the row is called."""
        match self.kind:
            case "decode":
                return f"step of {self.size} decodes"
            case "context":
                return f"step of {BATCH} decodes, {self.size:,} tokens each"
            case "cached pages":
                return f"request, half found, at {self.size:,} cached pages"
            case "adapters":
                return f"step of {BATCH} decodes, {self.size:,} adapters"
            case "slot turns":
                return f"request that takes a slot, {self.size:,} adapters"
            case "pages held" | "batch full":
                return f"step of {BATCH} decodes, {self.kind}, {self.size:,} tokens wait"
        return f"request of {self.size:,} tokens, {self.kind}"

    @property
    def is_kept(self) -> bool:
        """Whether its preparation serves all rounds."""
        return self.kind in ("cached pages", "adapters", "slot turns")


Measure = Callable[[], Sample]


class Prompts:
    """Random prompts, none twice; each token an object of its own, as when read from a message."""

    def __init__(self, case: Case) -> None:
        self._source = random.Random(case.name)
        self._numbers = count(1)

    def draw(self, num_tokens: int) -> list[int]:
        """Return a new prompt."""
        return self._source.choices(range(VOCAB_SIZE), k=num_tokens)

    def name(self) -> str:
        """Return a new request's name."""
        return f"request-{next(self._numbers)}"


def prepare(case: Case, open_core: OpenCore) -> Measure:
    """Make a scheduler ready for a case and return what measures one round of it."""
    prompts = Prompts(case)
    match case.kind:
        case "decode":
            return _prepare_decode(case, open_core, prompts, case.size, CONTEXT)
        case "context":
            return _prepare_decode(case, open_core, prompts, BATCH, case.size)
        case "miss" | "hit" | "evict":
            return _prepare_requests(case, open_core, prompts)
        case "cached pages":
            return _prepare_cached(case, open_core, prompts)
        case "adapters" | "slot turns":
            return _prepare_adapters(case, open_core, prompts)
        case "pages held" | "batch full":
            return _prepare_blocked(case, open_core, prompts)


def _finish_all(core: Core) -> int:
    """Step until no request is left; return the prompt tokens found in the cache."""
    found = 0
    while core.num_active:
        found += core.step()
    return found


def _serve(core: Core, prompts: Prompts, prompt: list[int], adapter: str | None = None) -> int:
    """Take a request in and run it to its end, one token on; return what it found."""
    core.add(prompts.name(), prompt, 1, adapter)
    return _finish_all(core)


def _prepare_decode(
    case: Case, open_core: OpenCore, prompts: Prompts, batch: int, context: int
) -> Measure:
    pages_each = (context + case.repeats) // PAGE_SIZE + 2
    core = open_core(
        CoreSizes(num_pages=batch * pages_each, max_running=batch, token_budget=batch * context)
    )

    def measure() -> Sample:
        for _ in range(batch):
            core.add(prompts.name(), prompts.draw(context), case.repeats + 2)
        core.step()  # all prompts
        core.step()  # the first decode of each
        core.spent.reset()
        for _ in range(case.repeats - 1):
            core.step()
        assert core.num_active == batch, "a sequence ended too early"
        result = sample(core.spent, case.repeats - 1)
        _finish_all(core)
        return result

    return measure


def _prepare_blocked(case: Case, open_core: OpenCore, prompts: Prompts) -> Measure:
    """Decodes that hold nearly all pages, or fill the batch, while one long prompt waits."""
    pages_each = (LOCKED_CONTEXT + case.repeats) // PAGE_SIZE + 2
    core = open_core(
        CoreSizes(
            num_pages=BATCH * pages_each,
            max_running=BATCH if case.kind == "batch full" else BATCH + 1,
            token_budget=BATCH * LOCKED_CONTEXT,
        )
    )

    def measure() -> Sample:
        for _ in range(BATCH):
            core.add(prompts.name(), prompts.draw(LOCKED_CONTEXT), case.repeats + 3)
        core.step()  # all prompts
        if case.size:
            core.add(prompts.name(), prompts.draw(case.size), 1)
        core.step()  # the first decode of each
        core.spent.reset()
        for _ in range(case.repeats - 1):
            core.step()
        assert core.num_active == BATCH + bool(case.size), "the prompt was not blocked"
        return sample(core.spent, case.repeats - 1)

    return measure


def _prepare_requests(case: Case, open_core: OpenCore, prompts: Prompts) -> Measure:
    pages = case.size // PAGE_SIZE
    room = FULL_POOL if case.kind == "evict" else (case.repeats + 2) * (pages + 1)
    core = open_core(CoreSizes(num_pages=room, max_running=64))
    known = prompts.draw(case.size)
    found = (case.size - 1) // PAGE_SIZE * PAGE_SIZE if case.kind == "hit" else 0

    def measure() -> Sample:
        _serve(core, prompts, known)
        while case.kind == "evict" and core.num_free_pages >= pages:
            _serve(core, prompts, prompts.draw(case.size))
        core.spent.reset()
        for _ in range(case.repeats):
            prompt = list(known) if case.kind == "hit" else prompts.draw(case.size)
            assert _serve(core, prompts, prompt) == found, f"not a {case.kind}"
        return sample(core.spent, case.repeats)

    return measure


def _prepare_cached(case: Case, open_core: OpenCore, prompts: Prompts) -> Measure:
    core = open_core(CoreSizes(num_pages=case.size, max_running=64))
    pages = FILL // PAGE_SIZE
    while core.num_free_pages > pages:
        _serve(core, prompts, prompts.draw(FILL))
    half = FILL // 2
    hot = [prompts.draw(half) for _ in range(NUM_HOT)]
    for prefix in hot:
        _serve(core, prompts, prefix + prompts.draw(half))
    turns = count()

    def measure() -> Sample:
        core.spent.reset()
        for _ in range(case.repeats):
            prompt = hot[next(turns) % NUM_HOT] + prompts.draw(half)
            assert _serve(core, prompts, prompt) == half, "a prefix in use was evicted"
        assert core.num_free_pages < pages, "nothing had to be evicted"
        return sample(core.spent, case.repeats)

    return measure


def _prepare_adapters(case: Case, open_core: OpenCore, prompts: Prompts) -> Measure:
    batch = BATCH
    pages_each = (CONTEXT + case.repeats) // PAGE_SIZE + 2
    core = open_core(
        CoreSizes(
            # what each adapter leaves behind, and what runs and is left in all rounds
            num_pages=2 * case.size + MAX_ROUNDS * (batch + case.repeats) * pages_each,
            max_running=batch + 1,
        )
    )
    adapters = [f"{number:064x}" for number in range(case.size)]
    for adapter in adapters:
        _serve(core, prompts, prompts.draw(2 * PAGE_SIZE), adapter)
    resident, turns = adapters[-NUM_SLOTS:], count()

    def measure_steps() -> Sample:
        for i in range(batch):
            core.add(
                prompts.name(), prompts.draw(CONTEXT), case.repeats + 2, resident[i % NUM_SLOTS]
            )
        core.step()
        core.step()
        core.spent.reset()
        for turn in range(case.repeats - 1):  # in each, one more request comes and goes
            core.add(prompts.name(), prompts.draw(CONTEXT), 1, resident[turn % NUM_SLOTS])
            core.step()
        assert core.num_active == batch, "the batch is not what it should be"
        result = sample(core.spent, case.repeats - 1)
        _finish_all(core)
        return result

    def measure_turns() -> Sample:
        core.spent.reset()
        for _ in range(case.repeats):  # in turn: each has been out of its slot for longest
            adapter = adapters[next(turns) % len(adapters)]
            _serve(core, prompts, prompts.draw(CONTEXT), adapter)
        return sample(core.spent, case.repeats)

    measure_one = measure_steps if case.kind == "adapters" else measure_turns

    def measure() -> Sample:
        result = measure_one()
        assert core.num_free_pages, "adapters are being forgotten: too many rounds"
        return result

    return measure
