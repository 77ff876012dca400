"""What a rank remembers of the running sequences from one plan to the next.

Owns the reading of a plan: what ends, starts and grows, and which copies it may ask for. Knows
nothing of tensors. Every rule that the scheduler must keep is asserted here, before anything of a
plan is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.protocol import PageCopy, Plan, SamplingParams, SequenceStart


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
