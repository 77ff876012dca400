"""The running sequences of a rank from one plan to the next, and a plan's chunks as an input batch.

Owns the reading of a plan: what ends, starts and grows, and which copies it may ask for. Every rule
that the scheduler must keep is asserted here, before anything of a plan is computed.

Owns the order of rows as well: sequences of one adapter slot stand together, the base model's
first, so that every adapter is one run of rows. Kernels are batch-invariant, so the order changes
no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import InputBatch
from worker.protocol import PENDING_TOKEN, Chunk, PageCopy, Plan, SamplingParams, SequenceStart


@dataclass(slots=True)
class RunningSequence:
    """A sequence between its start and its end."""

    slot: int | None
    sampling: SamplingParams
    num_prompt_tokens: int
    num_tokens: int  # positions whose K and V are, or in this step will be, in the pages
    pages: list[int]
    history: list[int]  # the tokens of those positions if sampling needs them, else empty


class SequenceTable:
    """The running sequences of one rank."""

    def __init__(
        self, *, page_size: int, num_pages: int, num_host_pages: int, max_model_len: int
    ) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._num_host_pages = num_host_pages
        self._max_model_len = max_model_len
        self._by_id: dict[int, RunningSequence] = {}

    def __getitem__(self, seq_id: int) -> RunningSequence:
        return self._by_id[seq_id]

    def apply(self, plan: Plan) -> list[int]:
        """Bring the table to its state after a plan; return the pages given out, to be cleared."""
        for seq_id in plan.ends:
            assert seq_id in self._by_id, f"sequence {seq_id} ends without having started"
            del self._by_id[seq_id]
        forks = self._check_copies(plan.copies)
        for start in plan.starts:
            self._start(start, forks)
        new_pages: list[int] = []
        grown: set[int] = set()
        for chunk in plan.chunks:
            assert chunk.seq_id in self._by_id, f"sequence {chunk.seq_id} has not started"
            assert chunk.seq_id not in grown, f"sequence {chunk.seq_id} has two chunks"
            grown.add(chunk.seq_id)
            self._grow(self._by_id[chunk.seq_id], chunk.start, chunk.token_ids, chunk.new_pages)
            new_pages += chunk.new_pages
        cleared = set(new_pages)
        assert len(cleared) == len(new_pages), "a page is given out twice"
        for start in plan.starts:
            assert cleared.isdisjoint(start.pages), f"a page of {start.pages} is given out again"
        return new_pages

    def _check_copies(self, copies: Sequence[PageCopy]) -> dict[int, int]:
        """Return the pages that hold a fork once the copies are made, and its positions in each."""
        forks: dict[int, int] = {}
        targets: set[int] = set()
        for copy in copies:
            self._check_copy(copy)
            if copy.kind == "save":
                continue
            targets.add(copy.target)
            forks.pop(copy.target, None)
            if copy.kind == "fork":
                forks[copy.target] = copy.num_positions
        if targets:
            for seq_id, sequence in self._by_id.items():
                assert targets.isdisjoint(sequence.pages), f"a copy over a page of {seq_id}"
        return forks

    def _check_copy(self, copy: PageCopy) -> None:
        num_sources = self._num_host_pages if copy.kind == "restore" else self._num_pages
        num_targets = self._num_host_pages if copy.kind == "save" else self._num_pages
        assert 0 <= copy.source < num_sources, f"no such page to copy from: {copy}"
        assert 0 <= copy.target < num_targets, f"no such page to copy to: {copy}"
        if copy.kind == "fork":
            assert copy.source != copy.target, f"a page is copied to itself: {copy}"
            assert 0 < copy.num_positions <= self._page_size, f"a fork of no such size: {copy}"
        else:
            assert copy.num_positions == self._page_size, f"only forks copy in part: {copy}"

    def _start(self, start: SequenceStart, forks: dict[int, int]) -> None:
        """Add a sequence; one that starts within a page takes that page out of `forks`."""
        assert start.seq_id not in self._by_id, f"sequence {start.seq_id} has started already"
        num_pages = -(-start.num_cached_tokens // self._page_size)
        assert len(start.pages) == num_pages, (
            f"{len(start.pages)} pages for {start.num_cached_tokens} cached tokens"
        )
        self._check_pages(start.pages)
        rest = start.num_cached_tokens % self._page_size
        if rest:  # it will write into its last page, so that must be a copy of its own
            num_forked = forks.pop(start.pages[-1], 0)
            assert num_forked == rest, (
                f"sequence {start.seq_id} starts {rest} positions into page {start.pages[-1]}, "
                f"which holds a fork of {num_forked}"
            )
        needs_history = start.sampling.needs_history
        assert len(start.history) == (start.num_cached_tokens if needs_history else 0), (
            f"history of {len(start.history)} tokens"
        )
        self._by_id[start.seq_id] = RunningSequence(
            slot=start.slot,
            sampling=start.sampling,
            num_prompt_tokens=start.num_prompt_tokens,
            num_tokens=start.num_cached_tokens,
            pages=list(start.pages),
            history=list(start.history),
        )

    def _grow(
        self,
        sequence: RunningSequence,
        start: int,
        token_ids: tuple[int, ...],
        new_pages: tuple[int, ...],
    ) -> None:
        assert token_ids, "a chunk has at least one token"
        assert start == sequence.num_tokens, f"chunk at {start}, not {sequence.num_tokens}"
        sequence.num_tokens += len(token_ids)
        assert sequence.num_tokens <= self._max_model_len, f"{sequence.num_tokens} positions"
        self._check_pages(new_pages)
        sequence.pages += new_pages
        assert len(sequence.pages) * self._page_size >= sequence.num_tokens, "too few pages"
        if sequence.sampling.needs_history:
            sequence.history += token_ids

    def _check_pages(self, pages: tuple[int, ...]) -> None:
        assert all(0 <= page < self._num_pages for page in pages), f"no such page in {pages}"


def pending_sequences(chunks: Sequence[Chunk]) -> list[int]:
    """Return the sequences of a plan whose token the step before it samples, in plan order."""
    unknown = [chunk for chunk in chunks if PENDING_TOKEN in chunk.token_ids]
    for chunk in unknown:
        assert chunk.token_ids == (PENDING_TOKEN,), f"of {chunk.seq_id} not all tokens are known"
    return [chunk.seq_id for chunk in unknown]


def build_input_batch(chunks: Sequence[Chunk], table: SequenceTable) -> InputBatch:
    """Return the rows of a plan's chunks, at least one, once `table` has applied the plan."""
    slots = [table[chunk.seq_id].slot for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-1 if (s := slots[i]) is None else s, i))
    ordered = [chunks[i] for i in order]
    sequences = [table[chunk.seq_id] for chunk in ordered]
    bounds = list(accumulate((len(chunk.token_ids) for chunk in ordered), initial=0))
    last_row = {chunk.seq_id: stop - 1 for chunk, stop in zip(ordered, bounds[1:], strict=True)}
    return InputBatch(
        token_ids=[token_id for chunk in ordered for token_id in chunk.token_ids],
        query_starts=bounds,
        context_lens=[sequence.num_tokens for sequence in sequences],
        page_tables=[sequence.pages for sequence in sequences],
        decodes=[_is_decode(c, s) for c, s in zip(ordered, sequences, strict=True)],
        runs=_runs([slots[i] for i in order], bounds),
        sample_rows=[last_row[chunk.seq_id] for chunk in chunks if draws(chunk, table)],
        pending_rows=[
            last_row[chunk.seq_id] for chunk in chunks if chunk.token_ids == (PENDING_TOKEN,)
        ],
        hidden_rows=[
            last_row[chunk.seq_id] + 1 - len(chunk.token_ids) + place
            for chunk in chunks
            if chunk.targets or table[chunk.seq_id].sampling.pooling
            for place in hidden_places(chunk, table[chunk.seq_id])
        ],
    )


def draws(chunk: Chunk, table: SequenceTable) -> bool:
    """Tell whether a token is drawn behind a chunk."""
    return chunk.samples and not table[chunk.seq_id].sampling.pooling


def hidden_places(chunk: Chunk, sequence: RunningSequence) -> range:
    """Return which of a chunk's tokens final hidden states are wanted of."""
    if chunk.targets:
        # Behind the prompt's last token comes none.
        stop = min(len(chunk.token_ids), sequence.num_prompt_tokens - 1 - chunk.start)
        assert len(chunk.targets) <= stop, f"targets of {chunk.seq_id} are not in its chunk"
        return range(stop - len(chunk.targets), stop)
    last = int(chunk.samples)
    num_pooled = {"": 0, "last": last, "mean": len(chunk.token_ids), "classify": last}
    count = num_pooled[sequence.sampling.pooling]
    return range(len(chunk.token_ids) - count, len(chunk.token_ids))


def _is_decode(chunk: Chunk, sequence: RunningSequence) -> bool:
    """Tell an output token from a piece of a prompt that happens to be one token long."""
    return len(chunk.token_ids) == 1 and chunk.start >= sequence.num_prompt_tokens


def _runs(slots: Sequence[int | None], bounds: Sequence[int]) -> tuple[SlotRows, ...]:
    """Join neighbouring sequences of one slot."""
    runs: list[SlotRows] = []
    for slot, start, stop in zip(slots, bounds, bounds[1:], strict=False):
        if slot is None:
            continue
        if runs and runs[-1].slot == slot:
            runs[-1] = SlotRows(slot, runs[-1].start, stop)
        else:
            runs.append(SlotRows(slot, start, stop))
    return tuple(runs)
