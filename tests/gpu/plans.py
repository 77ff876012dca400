"""Plans for one rank: who runs, on which pages, and how far; no scheduler is asked.

Owns the chain of plans and the pages that sequences have. A plan is started while the device is at
the one before it, as the product's scheduler does it.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engine.rank import Rank
from worker.engine.step_server import StartedStep
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Chunk,
    PageCopy,
    Plan,
    SamplingParams,
    SequenceStart,
    encode_plan,
)

_GREEDY = SamplingParams(temperature=0.0)
_TOKEN = 2
_AHEAD = 1  # plans that are started before the reply to the one before them is read


@dataclass
class Running:
    """A sequence of a rank."""

    seq_id: int
    slot: int | None
    pages: list[int]
    num_tokens: int  # positions that are computed
    last: int  # the token behind them, PENDING_TOKEN if the step before sampled it


@dataclass
class PlannedRank:
    """A rank and what it runs."""

    rank: Rank
    page_size: int
    num_pages: int
    running: list[Running] = field(default_factory=list)
    step: int = 0
    _digest: bytes = GENESIS
    _next_page: int = 0
    _next_id: int = 0

    def prefill(self, lengths: Sequence[int], slots: Sequence[int | None]) -> None:
        """Compute prompts in a step of their own, in which each samples a token."""
        starts, chunks = [], []
        for length, slot in zip(lengths, slots, strict=True):
            pages = self._take(-(-length // self.page_size))
            one = Running(self._new_id(), slot, pages, length, PENDING_TOKEN)
            starts.append(SequenceStart(one.seq_id, slot, _GREEDY, length, (), 0, ()))
            token_ids = tuple(2 + position % 89 for position in range(length))
            chunks.append(Chunk(one.seq_id, 0, token_ids, tuple(pages), samples=True))
            self.running.append(one)
        self._read(self._start(chunks, starts))

    def resume(self, tables: Sequence[Sequence[int]], slots: Sequence[int | None]) -> None:
        """Start sequences whose prompts are in full pages that others have computed."""
        starts = []
        for table, slot in zip(tables, slots, strict=True):
            num_tokens = len(table) * self.page_size
            one = Running(self._new_id(), slot, list(table), num_tokens, _TOKEN)
            where = tuple(table), num_tokens
            starts.append(SequenceStart(one.seq_id, slot, _GREEDY, num_tokens + 1, *where, ()))
            self.running.append(one)
        self._start((), starts).reply()

    def end_all(self) -> None:
        """End the sequences that run; their pages keep what they hold and are not given out."""
        self._start((), (), ends=tuple(one.seq_id for one in self.running)).reply()
        self.running = []

    def decode(self, count: int, copies: Sequence[PageCopy] = ()) -> list[float]:
        """Take so many steps of a token of each sequence; return the seconds between their ends.

        Args:
            count: of steps.
            copies: pages that each of them copies before.
        """
        seconds: list[float] = []
        asked: deque[StartedStep] = deque()
        last = time.perf_counter()
        for turn in range(count + _AHEAD):
            if turn < count:
                asked.append(self._start([self._chunk(one) for one in self.running], (), copies))
            if turn >= _AHEAD:
                self._read(asked.popleft())
                now = time.perf_counter()
                seconds.append(now - last)
                last = now
        return seconds[_AHEAD:]

    def _chunk(self, one: Running) -> Chunk:
        position = one.num_tokens
        new_pages: tuple[int, ...] = ()
        if position % self.page_size == 0 and position // self.page_size == len(one.pages):
            new_pages = tuple(self._take(1))
            one.pages += new_pages
        token_id, one.last = one.last, PENDING_TOKEN
        one.num_tokens = position + 1
        return Chunk(one.seq_id, position, (token_id,), new_pages, samples=True)

    def _read(self, started: StartedStep) -> None:
        """Wait for a step; what it sampled is known if it was the last one."""
        output = started.reply().output
        assert output is not None and not output.failed, "logits are not finite"
        if output.step == self.step:
            found = {token.seq_id: token.token_id for token in output.tokens}
            for one in self.running:
                one.last = found.get(one.seq_id, one.last)

    def _start(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[SequenceStart],
        copies: Sequence[PageCopy] = (),
        ends: Sequence[int] = (),
    ) -> StartedStep:
        self.step += 1
        plan = Plan(self.step, tuple(ends), tuple(starts), tuple(chunks), tuple(copies))
        frame, self._digest = encode_plan(plan, self._digest)
        return self.rank.start(frame)

    def _take(self, count: int) -> list[int]:
        first = self._next_page
        self._next_page += count
        assert self._next_page <= self.num_pages, "more pages than there are"
        return list(range(first, self._next_page))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
