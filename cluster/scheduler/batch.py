"""A step in the making, and what its parts are in the words of the ranks."""

from cluster.scheduler.kv_cache.checkpoints import ids_of
from cluster.scheduler.request_queue import TenantShare
from cluster.scheduler.sequence import Running
from worker.protocol import Chunk, SequenceStart


class Batch:
    """A step in the making."""

    __slots__ = (
        *("budget", "chunks", "deferred", "over", "over_budget", "started", "starts", "step"),
    )

    def __init__(self, step: int, budget: int, over: tuple[str, ...], over_budget: int) -> None:
        self.step = step
        self.budget = budget  # tokens left
        self.over = over  # tenants that run more than their share
        self.over_budget = over_budget  # tokens left for their prompts
        self.deferred: tuple[TenantShare, ...] = ()  # whose running work this step leaves out
        self.starts: list[SequenceStart] = []
        self.started: set[int] = set()  # the sequences of these: they do not give way in this step
        self.chunks: dict[int, Chunk] = {}  # by sequence, in plan order

    def put(self, chunk: Chunk) -> None:
        """Add a chunk at the end."""
        self.chunks[chunk.seq_id] = chunk
        self.budget -= len(chunk.token_ids)

    def room_for(self, tenant: str) -> int:
        """Return how many more tokens of a tenant's prompts the step may have."""
        return min(self.budget, self.over_budget) if tenant in self.over else self.budget

    def drop(self, seq_id: int) -> None:
        """Take a chunk out again, if there is one."""
        if seq_id in self.chunks:
            self.budget += len(self.chunks.pop(seq_id).token_ids)

    def defers(self, running: Running) -> bool:
        """Whether the step leaves out what runs of this tenant."""
        return running.sequence.flow.share in self.deferred


def end_of(chunk: Chunk) -> int:
    """Return the first position behind a chunk."""
    return chunk.start + len(chunk.token_ids)


def targets_of(running: Running, start: int, end: int) -> tuple[int, ...]:
    """Return the prompt's tokens that are to be scored by positions [start, end)."""
    sequence = running.sequence
    if not sequence.wants_prompt_logprobs:
        return ()
    first, stop = max(start, running.score_from), min(end, sequence.num_prompt_tokens - 1)
    return tuple(sequence.tokens[first + 1 : stop + 1])


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
        window_pages=ids_of(running.window_pages) if running.window_pages else (),
        state_page=ids_of(running.state_pages[:1])[0] if running.state_pages else None,
    )
