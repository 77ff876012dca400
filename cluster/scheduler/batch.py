"""A step in the making: who starts, and which positions of whom are computed.

Decides nothing.
"""

from dataclasses import dataclass, field

from cluster.scheduler.sequence import Running
from worker.protocol import Chunk, SequenceStart

MAX_IN_FLIGHT = 2  # steps: one that the ranks compute, and the one after it


@dataclass(slots=True)
class Batch:
    """A step in the making."""

    step: int
    budget: int  # tokens left
    starts: list[SequenceStart] = field(default_factory=list)
    chunks: dict[int, Chunk] = field(default_factory=dict)  # by sequence, in plan order

    def put(self, chunk: Chunk) -> None:
        """Add a chunk at the end."""
        self.chunks[chunk.seq_id] = chunk
        self.budget -= len(chunk.token_ids)

    def drop(self, seq_id: int) -> None:
        """Take a chunk out again, if there is one."""
        if seq_id in self.chunks:
            self.budget += len(self.chunks.pop(seq_id).token_ids)


def end_of(chunk: Chunk) -> int:
    """Return the first position behind a chunk."""
    return chunk.start + len(chunk.token_ids)


def start_of(running: Running) -> SequenceStart:
    """Return what the ranks are told of a sequence that enters the running set."""
    sequence, num_cached = running.sequence, running.num_computed
    sampling = sequence.request.sampling
    return SequenceStart(
        seq_id=sequence.seq_id,
        slot=running.slot,
        sampling=sampling,
        num_prompt_tokens=sequence.num_prompt_tokens,
        pages=tuple(running.pages),
        num_cached_tokens=num_cached,
        history=tuple(sequence.tokens[:num_cached]) if sampling.needs_history else (),
    )
