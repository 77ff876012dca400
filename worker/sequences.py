"""What a rank remembers of the running sequences from one plan to the next.

Owns the reading of a plan: what ends, starts and grows. Knows nothing of tensors. Every rule that
the scheduler must keep is asserted here, before anything of a plan is computed.
"""

from dataclasses import dataclass

from worker.protocol import Plan, SamplingParams, SequenceStart


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

    def __init__(self, *, page_size: int, num_pages: int, max_model_len: int) -> None:
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_model_len = max_model_len
        self._by_id: dict[int, RunningSequence] = {}

    def __getitem__(self, seq_id: int) -> RunningSequence:
        return self._by_id[seq_id]

    def apply(self, plan: Plan) -> list[int]:
        """Bring the table to its state after a plan; return the pages given out, to be cleared."""
        for seq_id in plan.ends:
            assert seq_id in self._by_id, f"sequence {seq_id} ends without having started"
            del self._by_id[seq_id]
        for start in plan.starts:
            self._start(start)
        new_pages: list[int] = []
        grown: set[int] = set()
        for chunk in plan.chunks:
            assert chunk.seq_id in self._by_id, f"sequence {chunk.seq_id} has not started"
            assert chunk.seq_id not in grown, f"sequence {chunk.seq_id} has two chunks"
            grown.add(chunk.seq_id)
            self._grow(self._by_id[chunk.seq_id], chunk.start, chunk.token_ids, chunk.new_pages)
            new_pages += chunk.new_pages
        assert len(set(new_pages)) == len(new_pages), "a page is given out twice"
        return new_pages

    def _start(self, start: SequenceStart) -> None:
        assert start.seq_id not in self._by_id, f"sequence {start.seq_id} has started already"
        assert start.num_cached_tokens == len(start.pages) * self._page_size, (
            f"{len(start.pages)} pages cannot hold {start.num_cached_tokens} cached tokens"
        )
        self._check_pages(start.pages)
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
