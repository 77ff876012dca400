"""The progress of one request, and what it holds in each state.

Held, while another sequence computes its prompt: nothing. Waiting: nothing. Running: pages, one
prefix lock and one adapter lease, all in `Running`, which exists exactly as long. Finished:
nothing. The running set alone moves a sequence to and from running.
"""

from dataclasses import dataclass, field
from enum import Enum

from cluster.request import Request
from cluster.scheduler.kv_cache.checkpoints import CheckpointPage
from cluster.scheduler.kv_cache.radix_tree import Match, Namespace, Node, PageKey
from cluster.scheduler.request_queue import Flow
from worker.protocol import TokenLogprobs


class Status(Enum):
    """Where a sequence is in its life."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """What outlives a preemption: the tokens so far and what the client has been told."""

    seq_id: int  # 1, 2, 3, ... in order of arrival
    order: tuple[int, int]  # (priority, seq_id): the smallest goes first, the greatest gives way
    request: Request
    flow: Flow
    namespace: Namespace
    page_size: int
    token_limit: int  # prompt and output together
    tokens: list[int]  # prompt and output; only ever appended to
    stop_token_ids: frozenset[int]
    leader: "Sequence | None" = None  # computes the prompt for this one too; None: it does itself
    status: Status = Status.WAITING
    num_cached_tokens: int | None = None  # at the first admission; None: never admitted
    match: Match | None = None  # the cached prefix while it waits, and what it was matched at:
    matched_at: tuple[int, int] = (0, 0)  # version of the tree, and pages asked for
    # Pages of its prefix that were found where it was matched last, if it could not be resumed
    # behind all of them; else 0. There another prompt parts from it, or ends.
    parting: int = 0
    # Of the prompt's tokens from the second on, as far as they are computed, until they are sent.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_scored: int = 0  # how many have been computed
    _keys: list[PageKey] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its first event carries the log-probabilities of its prompt."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and not self.request.output_token_ids  # the client has them
        )

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether cached pages do not do for its prompt: its output is of all hidden states."""
        if self.wants_prompt_logprobs:
            return self.num_scored < self.num_prompt_tokens - 1
        return self.request.sampling.pooling == "mean"

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the client's prompt."""
        return len(self.request.token_ids)

    def keys(self, num_pages: int) -> list[PageKey]:
        """Return the keys of the first `num_pages` pages, each cut from the tokens only once."""
        size = self.page_size
        assert num_pages * size <= len(self.tokens), "a page of tokens that nobody knows"
        for page in range(len(self._keys), num_pages):
            self._keys.append(tuple(self.tokens[page * size : (page + 1) * size]))
        return self._keys[:num_pages]


@dataclass(slots=True, eq=False)
class Running:
    """What a running sequence holds.

    Page table: pages [0, num_kept) are known to the tree; pages [num_kept, ...) are private. Where
    another sequence's copy was in the tree first, ours is in `duplicates`: still in the page
    table, because the ranks have it, but private until the end.
    """

    sequence: Sequence
    slot: int | None  # None: the base model
    lock: Node  # ends where page num_kept begins
    pages: list[int]
    num_kept: int
    num_computed: int  # positions whose K/V is in `pages`
    score_from: int = 0  # rows before this one have been scored by an earlier run
    duplicates: list[int] = field(default_factory=list)
    # Of layers with a window: the pages from page `first_window` of its page table on.
    window_pages: list[CheckpointPage] = field(default_factory=list)
    first_window: int = 0
    # Of layers with states: its own page first, and those of states that are kept for the tree,
    # each with its position in pages, until the tree has the pages before it.
    state_pages: list[CheckpointPage] = field(default_factory=list)
    kept_states: list[tuple[int, CheckpointPage]] = field(default_factory=list)
    state_at: int = 0  # positions that its own page is behind, once the ranks have answered
    states_kept_to: int = 0  # the last position that a state has been kept at, or was there
    is_decoding: bool = False
    is_ending: bool = False  # ends when the last step in flight that has it is committed
    is_failed: bool = False  # its logits were not finite: nothing more of it enters the cache

    @property
    def seq_id(self) -> int:
        """Arrival number."""
        return self.sequence.seq_id

    @property
    def adapter(self) -> str:
        """Adapter digest, or BASE."""
        return self.sequence.request.adapter

    def private_pages(self) -> list[int]:
        """Return the pages that no tree has."""
        return self.pages[self.num_kept :] + self.duplicates
