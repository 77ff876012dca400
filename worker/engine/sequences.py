"""The running sequences of a rank from one plan to the next, and a plan's chunks as an input batch.

Owns the reading of a plan: what ends, starts and grows, and which copies it may ask for. Every rule
that the scheduler must keep is asserted here, before anything of a plan is computed.

Owns the order of rows as well: sequences of one adapter slot stand together, the base model's
first, so that every adapter is one run of rows. Kernels are batch-invariant, so the order changes
no result.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import InputBatch
from worker.pools import NO_PAGES, PageCounts, PoolName
from worker.protocol import (
    PENDING_TOKEN,
    Chunk,
    PageCopy,
    Plan,
    SequenceStart,
)
from worker.sampling.sequence_sampling import SequenceSampling

_PENDING = (PENDING_TOKEN,)  # all tokens of a chunk whose token is not known yet


@dataclass(slots=True)
class RunningSequence:
    """A sequence between its start and its end."""

    serial: int  # of its start, among all of its table
    slot: int | None
    sampling: SequenceSampling
    num_prompt_tokens: int
    num_tokens: int  # positions whose K and V are, or in this step will be, in the pages
    pages: "array[int]"  # int32, so that a step copies it as it lies
    window_pages: "array[int]"  # of layers with a window: from page `first_window` of the table on
    first_window: int
    history: list[int]  # the tokens of those positions if sampling needs them, else empty
    state_page: int | None = None  # of layers with mixers; None: there are none


class SequenceTable:
    """The running sequences of one rank."""

    def __init__(
        self,
        *,
        page_size: int,
        pages: PageCounts,
        host_pages: PageCounts = NO_PAGES,
        max_model_len: int,
        window: int = 0,
    ) -> None:
        """Make an empty table.

        Layers with a window have pages of their own unless it is 0; there are layers with states if
        there are pages for them.
        """
        self._page_size = page_size
        self._num_pages = pages.by_pool()
        self._num_host_pages = host_pages.by_pool()
        self.window = window
        self._max_model_len = max_model_len
        self._by_id: dict[int, RunningSequence] = {}
        self.with_history: set[int] = set()  # the sequences whose sampling needs theirs
        self._num_started = 0

    def __getitem__(self, seq_id: int) -> RunningSequence:
        return self._by_id[seq_id]

    def of_chunks(self, chunks: Sequence[Chunk]) -> list[RunningSequence]:
        """Return the sequence of each chunk."""
        by_id = self._by_id
        return [by_id[chunk.seq_id] for chunk in chunks]

    def apply(self, plan: Plan) -> None:
        """Bring the table to its state after a plan."""
        for seq_id in plan.ends:
            assert seq_id in self._by_id, f"sequence {seq_id} ends without having started"
            del self._by_id[seq_id]
            self.with_history.discard(seq_id)
        if self.window:
            for sequence in self._by_id.values():
                self._leave_pages_behind(sequence)
        forks = self._check_copies(plan.copies)
        for start in plan.starts:
            self._start(start, forks)
        started = [self._by_id[start.seq_id] for start in plan.starts]
        started_on = {page for sequence in started for page in sequence.pages}
        window_started_on = {page for sequence in started for page in sequence.window_pages}
        ids = [chunk.seq_id for chunk in plan.chunks]
        assert len(set(ids)) == len(ids), f"a sequence has two chunks: {ids}"
        for chunk in plan.chunks:
            grown = self._by_id.get(chunk.seq_id)
            assert grown is not None, f"sequence {chunk.seq_id} has not started"
            self._grow(grown, chunk)
        new_pages = [page for chunk in plan.chunks for page in chunk.new_pages]
        new_window_pages = [page for chunk in plan.chunks for page in chunk.new_window_pages]
        for given, in_use in ((new_pages, started_on), (new_window_pages, window_started_on)):
            assert len(set(given)) == len(given), "a page is given out twice"
            assert in_use.isdisjoint(given), "a page that a sequence starts on is given out again"

    def _leave_pages_behind(self, sequence: RunningSequence) -> None:
        """Forget the pages that no position from the next one on sees: others may have them."""
        first = max(0, sequence.num_tokens + 1 - self.window) // self._page_size
        if first > sequence.first_window:
            del sequence.window_pages[: first - sequence.first_window]
            sequence.first_window = first

    def _check_copies(self, copies: Sequence[PageCopy]) -> dict[PoolName, dict[int, int]]:
        """Return the pages that hold a fork once the copies are made, and its positions in each."""
        forks: dict[PoolName, dict[int, int]] = {"full": {}, "window": {}, "state": {}}
        targets: dict[PoolName, set[int]] = {"full": set(), "window": set(), "state": set()}
        for copy in copies:
            self._check_copy(copy)
            if copy.kind == "save":
                continue
            targets[copy.pool].add(copy.target)
            forks[copy.pool].pop(copy.target, None)
            if copy.kind == "fork":
                forks[copy.pool][copy.target] = copy.num_positions
        if any(targets.values()):
            for seq_id, sequence in self._by_id.items():
                is_free = targets["full"].isdisjoint(sequence.pages)
                is_free &= targets["window"].isdisjoint(sequence.window_pages)
                is_free &= sequence.state_page not in targets["state"]
                assert is_free, f"a copy over a page of {seq_id}"
        return forks

    def _check_copy(self, copy: PageCopy) -> None:
        num_pages, num_host_pages = self._num_pages[copy.pool], self._num_host_pages[copy.pool]
        num_sources = num_host_pages if copy.kind == "restore" else num_pages
        num_targets = num_host_pages if copy.kind == "save" else num_pages
        assert 0 <= copy.source < num_sources, f"no such page to copy from: {copy}"
        assert 0 <= copy.target < num_targets, f"no such page to copy to: {copy}"
        if copy.kind == "fork":
            assert copy.source != copy.target, f"a page is copied to itself: {copy}"
            assert 0 < copy.num_positions <= self._page_size, f"a fork of no such size: {copy}"
        else:
            assert copy.num_positions == self._page_size, f"only forks copy in part: {copy}"

    def _start(self, start: SequenceStart, forks: dict[PoolName, dict[int, int]]) -> None:
        """Add a sequence; one that starts within a page takes that page out of `forks`."""
        assert start.seq_id not in self._by_id, f"sequence {start.seq_id} has started already"
        num_pages = -(-start.num_cached_tokens // self._page_size)
        assert len(start.pages) == num_pages, (
            f"{len(start.pages)} pages for {start.num_cached_tokens} cached tokens"
        )
        self._check_pages(start.pages, "full")
        self._check_pages(start.window_pages, "window")
        self._check_state(start, forks["state"])
        first_window = num_pages - len(start.window_pages) if self.window else 0
        first_seen = max(0, start.num_cached_tokens + 1 - self.window) // self._page_size
        assert 0 <= first_window <= first_seen or not self.window, (
            f"{len(start.window_pages)} window pages for {start.num_cached_tokens} cached tokens"
        )
        rest = start.num_cached_tokens % self._page_size
        if rest:  # it will write into its last page, so that must be a copy of its own
            self._check_fork(start, start.pages[-1], rest, forks["full"])
            if self.window:
                self._check_fork(start, start.window_pages[-1], rest, forks["window"])
        sampling = SequenceSampling.of(start.sampling)
        num_known = start.num_cached_tokens if sampling.needs_history else 0
        assert len(start.history) == num_known, f"history of {len(start.history)} tokens"
        if sampling.needs_history:
            self.with_history.add(start.seq_id)
        self._num_started += 1
        self._by_id[start.seq_id] = RunningSequence(
            serial=self._num_started,
            slot=start.slot,
            sampling=sampling,
            num_prompt_tokens=start.num_prompt_tokens,
            num_tokens=start.num_cached_tokens,
            pages=array("i", start.pages),
            window_pages=array("i", start.window_pages),
            first_window=first_window,
            history=list(start.history),
            state_page=start.state_page,
        )
        if self.window:
            self._leave_pages_behind(self._by_id[start.seq_id])

    def _check_state(self, start: SequenceStart, forks: dict[int, int]) -> None:
        """Check that a sequence has a state page of its own, and there a copy if it needs one.

        A copy is one sequence's, so it is taken out of `forks`.
        """
        page, who = start.state_page, f"sequence {start.seq_id}"
        has_states = self._num_pages["state"] > 0
        assert (page is not None) == has_states, f"{who} starts on state page {page}"
        if page is None:
            return
        self._check_pages((page,), "state")
        held = (sequence.state_page for sequence in self._by_id.values())
        assert page not in held, f"{who} starts on a state page that another one has"
        is_copy = forks.pop(page, None) is not None
        assert is_copy or not start.num_cached_tokens, f"{who} starts on a state that is no copy"

    @staticmethod
    def _check_fork(start: SequenceStart, page: int, rest: int, forks: dict[int, int]) -> None:
        num_forked = forks.pop(page, 0)
        assert num_forked == rest, (
            f"sequence {start.seq_id} starts {rest} positions into page {page}, "
            f"which holds a fork of {num_forked}"
        )

    def _grow(self, sequence: RunningSequence, chunk: Chunk) -> None:
        token_ids, start = chunk.token_ids, chunk.start
        assert token_ids, "a chunk has at least one token"
        assert start == sequence.num_tokens, f"chunk at {start}, not {sequence.num_tokens}"
        sequence.num_tokens = num_tokens = start + len(token_ids)
        assert num_tokens <= self._max_model_len, f"{num_tokens} positions"
        if chunk.new_pages:
            self._check_pages(chunk.new_pages, "full")
            sequence.pages.extend(chunk.new_pages)
        if self.window or chunk.new_window_pages:
            num_new = len(chunk.new_pages) if self.window else 0
            assert len(chunk.new_window_pages) == num_new, "page tables of unequal lengths"
            self._check_pages(chunk.new_window_pages, "window")
            sequence.window_pages.extend(chunk.new_window_pages)
        assert len(sequence.pages) * self._page_size >= num_tokens, "too few pages"
        if sequence.sampling.needs_history:
            sequence.history += token_ids

    def _check_pages(self, pages: tuple[int, ...], pool: PoolName) -> None:
        num_pages = self._num_pages[pool]
        assert all(0 <= page < num_pages for page in pages), f"no such page in {pages}"


def pending_sequences(chunks: Sequence[Chunk]) -> list[int]:
    """Return the sequences of a plan whose token the step before it samples, in plan order."""
    for chunk in chunks:
        token_ids = chunk.token_ids
        is_known = len(token_ids) == 1 or PENDING_TOKEN not in token_ids
        assert is_known, f"of {chunk.seq_id} not all tokens are known"
    return [chunk.seq_id for chunk in chunks if chunk.token_ids == _PENDING]


def build_input_batch(chunks: Sequence[Chunk], table: SequenceTable) -> InputBatch:
    """Return the rows of a plan's chunks, at least one, once `table` has applied the plan.

    With the pages that the plan has given out.
    """
    planned = table.of_chunks(chunks)
    slots = [-1 if one.slot is None else one.slot for one in planned]
    has_slots = max(slots) >= 0
    order: Sequence[int] = range(len(chunks))
    if has_slots:  # those of a slot in plan order
        order = sorted(order, key=slots.__getitem__)
    sequences = [planned[i] for i in order]
    token_ids: list[int] = []
    starts, decodes, last_rows = [0], [], [0] * len(chunks)
    for i, sequence in zip(order, sequences, strict=True):
        chunk = chunks[i]
        count = len(chunk.token_ids)
        token_ids += chunk.token_ids
        end = starts[-1] + count
        last_rows[i] = end - 1
        starts.append(end)
        # An output token, not a piece of a prompt that happens to be one token long.
        decodes.append(count == 1 and chunk.start >= sequence.num_prompt_tokens)
    sample_rows, pending_rows, hidden_rows = [], [], []
    for chunk, sequence, row in zip(chunks, planned, last_rows, strict=True):
        if draws(chunk, sequence):
            sample_rows.append(row)
        if chunk.token_ids == _PENDING:
            pending_rows.append(row)
        if chunk.targets or sequence.sampling.is_pooled:
            first = row + 1 - len(chunk.token_ids)
            hidden_rows += [first + place for place in hidden_places(chunk, sequence)]
    return InputBatch(
        token_ids=token_ids,
        query_starts=starts,
        context_lens=[sequence.num_tokens for sequence in sequences],
        page_tables=[sequence.pages for sequence in sequences],
        serials=[sequence.serial for sequence in sequences],
        window_tables=[_window_table(one) for one in sequences] if table.window else (),
        state_pages=[one.state_page for one in sequences if one.state_page is not None],
        decodes=decodes,
        runs=_runs([one.slot for one in sequences], starts) if has_slots else (),
        sample_rows=sample_rows,
        pending_rows=pending_rows,
        hidden_rows=hidden_rows,
        new_pages=[page for chunk in chunks for page in chunk.new_pages],
        new_window_pages=[page for chunk in chunks for page in chunk.new_window_pages],
    )


def _window_table(sequence: RunningSequence) -> "array[int]":
    """Return its pages in layers with a window, as a table from its first position on.

    In place of those that it has left stands the first that it sees: a kernel may read more than
    it needs, but not what others have there.
    """
    return sequence.window_pages[:1] * sequence.first_window + sequence.window_pages


def draws(chunk: Chunk, sequence: RunningSequence) -> bool:
    """Tell whether a token is drawn behind a chunk of a sequence."""
    return chunk.samples and not sequence.sampling.is_pooled


def hidden_places(chunk: Chunk, sequence: RunningSequence) -> range:
    """Return which of a chunk's tokens final hidden states are wanted of."""
    if chunk.targets:
        # Behind the prompt's last token comes none.
        stop = min(len(chunk.token_ids), sequence.num_prompt_tokens - 1 - chunk.start)
        assert len(chunk.targets) <= stop, f"targets of {chunk.seq_id} are not in its chunk"
        return range(stop - len(chunk.targets), stop)
    last = int(chunk.samples)
    num_pooled = {"": 0, "last": last, "mean": len(chunk.token_ids), "classify": last}
    count = num_pooled[sequence.sampling.params.pooling]
    return range(len(chunk.token_ids) - count, len(chunk.token_ids))


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
