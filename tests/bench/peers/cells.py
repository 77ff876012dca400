"""What is asked in each cell of the tables, and the figures that come of one round.

Owns prompt lengths and names.
"""

from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Protocol

from deploy.bench.workload import Workload
from tests.bench.peers.target import Target

CONCURRENCIES = (1, 8, 16)
INPUT_LEN, OUTPUT_LEN = 128, 64
PREFIX_LEN, UNIQUE_LEN, PREFIX_OUTPUT_LEN = 1024, 32, 32
PREFIX_ADAPTERS = PREFIX_CONCURRENCY = 4
PREFILL_LEN = 4096
DECODE_INPUT_LEN, DECODE_OUTPUT_LEN = 16, 128  # of a load that hardly has prompts
MEMORY_CONCURRENCY = 8

Figures = dict[str, float]  # of one round, by column
SPEED, PROMPT_SPEED = "tok/s", "prompt tok/s"
TTFT, ITL_P50, ITL_P99 = "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms"
COLD, WARM = "cold TTFT ms", "warm TTFT p50 ms"
MEMORY = "peak MiB"


class What(StrEnum):
    """What can be measured."""

    BASE = "base"
    ADAPTERS = "adapters"
    UNUSED = "unused"
    PREFIX = "prefix"
    PREFILL = "prefill"
    MEMORY = "memory"
    OVERHEAD = "overhead"
    RANKS = "ranks"


OF_OURS = frozenset({What.UNUSED, What.OVERHEAD, What.RANKS})  # no peer has a part in these


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much is asked in one round."""

    waves: int  # requests over clients
    num_requests: int | None = None  # instead, in every cell
    vocab_size: int

    def requests(self, concurrency: int, num_models: int) -> int:
        """Return the requests of a round: every client is busy and every model asked."""
        return self.num_requests or max(self.waves * max(concurrency, 2), num_models)


class Cell(Protocol):
    """One line of a table for each target."""

    @property
    def what(self) -> What:
        """Which table it is in."""

    @property
    def name(self) -> str:
        """What its line is called."""

    @property
    def only(self) -> frozenset[str] | None:
        """Names of the targets that are asked; None: all."""

    @property
    def is_last(self) -> bool:
        """Whether it is measured once, in the last round."""

    def measure(self, target: Target, round_number: int, amount: Amount) -> Figures:
        """Ask one round of a target that is awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCell:
    """Clients in a closed loop."""

    what: What
    name: str
    models: tuple[str, ...]
    concurrency: int
    input_len: int = INPUT_LEN
    output_len: int = OUTPUT_LEN
    only: frozenset[str] | None = None
    is_last: bool = False

    def measure(self, target: Target, round_number: int, amount: Amount) -> Figures:
        """Ask one round of a target that is awake."""
        run = target.answer(self.workload(amount), round_number)
        return {
            SPEED: run.tokens_per_second,
            TTFT: 1000 * run.first_token(50),
            ITL_P50: 1000 * run.inter_token(50),
            ITL_P99: 1000 * run.inter_token(99),
        }

    def workload(self, amount: Amount) -> Workload:
        """Return what is asked."""
        return Workload(
            name=f"{self.what}, {self.name}",
            models=self.models,
            concurrency=self.concurrency,
            num_requests=amount.requests(self.concurrency, len(self.models)),
            input_len=self.input_len,
            output_len=self.output_len,
            vocab_size=amount.vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCell:
    """A prompt per adapter that its requests begin with: the first of each alone, then others."""

    models: tuple[str, ...]
    what: What = What.PREFIX
    name: str = f"{PREFIX_LEN} shared + {UNIQUE_LEN}, {PREFIX_CONCURRENCY} concurrent"
    only: frozenset[str] | None = None
    is_last: bool = False

    def measure(self, target: Target, round_number: int, amount: Amount) -> Figures:
        """Ask one round of a target that is awake."""
        cold, warm = self.workloads(amount)
        first, others = target.answer(cold, round_number), target.answer(warm, round_number)
        return {
            COLD: 1000 * median(s.token_times[0] - s.sent for s in first.samples),
            WARM: 1000 * others.first_token(50),
            SPEED: others.tokens_per_second,
        }

    def workloads(self, amount: Amount) -> tuple[Workload, Workload]:
        """Return what finds nothing cached, and what finds what that has left."""
        num_cold = min(len(self.models), amount.num_requests or len(self.models))
        models = self.models[:num_cold]
        num_warm = amount.requests(PREFIX_CONCURRENCY, num_cold)
        return self._workload(models, 1, 0, num_cold, amount), self._workload(
            models, PREFIX_CONCURRENCY, num_cold, num_warm, amount
        )

    def _workload(
        self, models: tuple[str, ...], concurrency: int, first: int, count: int, amount: Amount
    ) -> Workload:
        return Workload(
            name=self.what,
            models=models,
            concurrency=concurrency,
            num_requests=count,
            first=first,
            input_len=PREFIX_LEN + UNIQUE_LEN,
            output_len=PREFIX_OUTPUT_LEN,
            shared_prefix_len=PREFIX_LEN,
            vocab_size=amount.vocab_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCell:
    """One long prompt."""

    base: str
    what: What = What.PREFILL
    name: str = f"one prompt of {PREFILL_LEN}"
    only: frozenset[str] | None = None
    is_last: bool = False

    def measure(self, target: Target, round_number: int, amount: Amount) -> Figures:
        """Ask one round of a target that is awake."""
        load = Workload(
            name=self.what,
            models=(self.base,),
            concurrency=1,
            num_requests=1,
            input_len=PREFILL_LEN,
            output_len=1,
            vocab_size=amount.vocab_size,
        )
        seconds = target.answer(load, round_number).first_token(50)
        return {PROMPT_SPEED: PREFILL_LEN / seconds, TTFT: 1000 * seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCell:
    """The most memory while a load goes on, and after it."""

    load: LoadCell
    what: What = What.MEMORY
    only: frozenset[str] | None = None
    is_last: bool = True

    @property
    def name(self) -> str:
        """Its line in the table."""
        return self.load.name

    def measure(self, target: Target, round_number: int, amount: Amount) -> Figures:
        """Ask one round of a target that is awake."""
        with target.watched() as looks:
            target.answer(self.load.workload(amount), round_number)
        return {MEMORY: max(looks) / 2**20}
