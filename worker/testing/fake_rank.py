"""A rank without a model: its tokens are a hash of what a model's would depend on.

It keeps for each position of every page which adapter and which tokens up to it made its K and V. A
plan that would read anything else on a real rank, another adapter's page, a page out of order, a
page given away or copied over too early, fails an assertion here.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

from worker.engine.step_server import StartedStep
from worker.lora.shard import AdapterShard
from worker.pools import NO_PAGES, PageCounts, PoolName
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Chunk,
    PageCopy,
    Plan,
    PooledPrompt,
    Pooling,
    PromptLogprobs,
    RankInfo,
    SampledToken,
    SamplingParams,
    SequenceStart,
    StepOutput,
    StepReply,
    TokenLogprobs,
    decode_plan,
)
from worker.testing.fake_pages import Entry, FakePages, FakeState, FakeStates, FakeWindow

_HASH_BYTES = 16
Forks = dict[PoolName, dict[int, int]]  # by pool and page: positions
# Any grammar is the same one, see `fake_forced`; this one can be followed only so far.
FAILING_GRAMMAR, FAILS_AFTER = "fails", 9


def _hash(*parts: bytes | int | str) -> bytes:
    """Return a hash of parts; equal only for equal parts."""
    digest = blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _root(adapter: str | None) -> bytes:
    """Return the content of "nothing yet" for an adapter; None is the base model."""
    return _hash("base") if adapter is None else _hash("adapter", adapter)


def _sample(content: bytes, sampling: SamplingParams, vocab_size: int) -> SampledToken:
    bits = _hash(content, sampling.seed)
    token_id = int.from_bytes(bits[:8], "little") % vocab_size
    if sampling.num_logprobs is None:
        return SampledToken(0, token_id)
    logprob = -int.from_bytes(bits[8:], "little") / 2**64
    top = tuple(((token_id + i) % vocab_size, logprob - i) for i in range(sampling.num_logprobs))
    return SampledToken(0, token_id, logprob, top)


def fake_continuation(
    adapter: str | None,
    token_ids: tuple[int, ...],
    num_tokens: int,
    *,
    seed: int = 0,
    vocab_size: int = 1000,
    grammar: str = "",
) -> tuple[int, ...]:
    """Return the tokens that `FakeRank` samples after a prompt, for comparison."""
    content = _root(adapter)
    for token_id in token_ids:
        content = _hash(content, token_id)
    tokens: list[int] = []
    for _ in range(num_tokens):
        forced = fake_forced(tokens, vocab_size) if grammar else ()
        if grammar == FAILING_GRAMMAR and not forced and len(tokens) >= FAILS_AFTER:
            break
        drawn = _sample(content, SamplingParams(seed=seed), vocab_size).token_id
        tokens.append(forced[0] if forced else drawn)
        content = _hash(content, tokens[-1])
    return tuple(tokens)


def fake_forced(output: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that the grammar of `FakeRank` forces behind an output.

    Two come first, and up to five behind every third token that is not forced itself.
    """
    forced = [1, 2]
    for token_id in output:
        if forced:
            assert token_id == forced.pop(0), f"{token_id} was not forced"
        elif token_id % 3 == 0:
            forced = [(31 * token_id + i) % vocab_size for i in range(token_id % 5 + 1)]
    return tuple(forced)


def fake_pooled(adapter: str | None, token_ids: Sequence[int], pooling: Pooling) -> bytes:
    """Return what `FakeRank` makes of a prompt that is to be pooled, [4] float32."""
    content = _root(adapter)
    for token_id in token_ids:
        content = _hash(content, token_id)
    return _pooled(content, pooling)


def fake_prompt_logprobs(
    adapter: str | None, token_ids: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Return how `FakeRank` scores the tokens of a prompt from the second on."""
    content, scores = _root(adapter), []
    for token_id, following in pairwise(token_ids):
        content = _hash(content, token_id)
        scores.append(_score(content, following))
    return tuple(scores)


def _score(content: bytes, token_id: int) -> TokenLogprobs:
    return -int.from_bytes(_hash(content, "scored", token_id)[:4], "little") / 2**32, (), 1


def _pooled(content: bytes, pooling: Pooling) -> bytes:
    return struct.pack("<4f", *(byte - 127.5 for byte in _hash(content, pooling)[:4]))


@dataclass(slots=True)
class _Sequence:
    slot: int | None
    adapter: str | None  # None: the base model
    sampling: SamplingParams
    pages: list[int]
    owned: set[int]  # pages it was given to write, or starts within
    tokens: list[int]
    content: bytes
    num_prompt_tokens: int
    computed_from: int  # what it began with
    window: FakeWindow
    state_page: int | None
    sampled: int | None = None  # after its last chunk, which was in the last step


class FakeRank:
    """Has the interface of `worker.engine.rank.Rank` as far as steps need it."""

    def __init__(
        self, *, page_size: int, num_slots: int = 0, vocab_size: int = 1000, window: int = 0
    ) -> None:
        self._page_size = page_size
        self._window = window  # positions that a row sees in some layers; 0: all layers see all
        self._vocab_size = vocab_size
        self._slots: list[str | None] = [None] * num_slots
        self._pages = FakePages(page_size=page_size, num_pages=0, num_host_pages=0)
        self._window_pages = FakePages(page_size=page_size, num_pages=0, num_host_pages=0)
        self._states = FakeStates(page_size=page_size, num_pages=0, num_host_pages=0)
        self._has_states = False
        self._sequences: dict[int, _Sequence] = {}
        self._digest = GENESIS
        self._last_step = 0

    def load(
        self,
        max_pages: PageCounts = PageCounts(1024),  # noqa: B008, frozen
        max_host_pages: PageCounts = NO_PAGES,
    ) -> RankInfo:
        """Return what a rank does after loading."""
        return RankInfo(
            rank=0,
            pid=os.getpid(),
            node_id="",
            max_pages=max_pages,
            max_host_pages=max_host_pages,
            page_bytes=1,
            weight_bytes=0,
            device="fake",
            products="nothing",
            window=self._window,
            window_page_bytes=1 if self._window else 0,
        )

    def allocate(self, pages: PageCounts, host_pages: PageCounts = NO_PAGES) -> None:
        """Make the pages, on the device and in host memory."""
        self._pages = FakePages(
            page_size=self._page_size, num_pages=pages.full, num_host_pages=host_pages.full
        )
        self._window_pages = FakePages(
            page_size=self._page_size,
            num_pages=pages.window,
            num_host_pages=host_pages.window,
        )
        self._has_states = pages.state > 0
        self._states = FakeStates(
            page_size=self._page_size,
            num_pages=pages.state,
            num_host_pages=host_pages.state,
        )

    def load_adapter(
        self,
        slot: int,
        adapter: str,
        weights: Sequence[float] = (1.0,),
        shards: Sequence[AdapterShard] = (),
    ) -> int:
        """Put an adapter, with or without shards, into a slot that no running sequence uses.

        Returns:
            The bytes of the shards, as if they were held.
        """
        assert len(shards) in (0, len(weights)), f"{len(shards)} shards, {len(weights)} weights"
        self._check_unused(slot)
        self._slots[slot] = adapter
        return sum(shard.data.nbytes for shard in shards)

    def clear_slot(self, slot: int, adapter: str) -> None:
        """Empty a slot that no running sequence uses, unless it holds another adapter by now."""
        if self._slots[slot] == adapter:
            self._check_unused(slot)
            self._slots[slot] = None

    def bank(self) -> list[str | None]:
        """Return the adapter in each slot."""
        return list(self._slots)

    def start(self, frame: bytes) -> StartedStep:
        """Do what `step` does: nothing is left to wait for."""
        reply = self.step(frame)
        return StartedStep(True, lambda: reply)

    def step(self, frame: bytes) -> StepReply:
        """Check and run the plan in a frame.

        Raises:
            PlanMismatch: if the plan does not continue this rank's chain.
            AssertionError: if the plan would make a real rank compute something wrong.
        """
        plan, self._digest = decode_plan(frame, self._digest, self._last_step + 1)
        self._last_step = plan.step
        for seq_id in plan.ends:
            assert seq_id in self._sequences, f"sequence {seq_id} ends without having started"
            del self._sequences[seq_id]
        forks = self._copy(plan.copies)
        for start in plan.starts:
            self._start(start, forks)
        self._give_out(plan)
        scored = tuple(self._score(chunk) for chunk in plan.chunks if chunk.targets)
        tokens = [self._run(chunk) for chunk in plan.chunks]
        for seq_id in self._sequences.keys() - {chunk.seq_id for chunk in plan.chunks}:
            self._sequences[seq_id].sampled = None
        sampled = tuple(token for token in tokens if isinstance(token, SampledToken))
        pooled = tuple(token for token in tokens if isinstance(token, PooledPrompt))
        errors = tuple((token, "it ends here") for token in tokens if isinstance(token, int))
        failed = tuple(seq_id for seq_id, _ in errors)
        return StepReply(
            plan.step, StepOutput(plan.step, sampled, failed, errors, scored, pooled=pooled)
        )

    def _copy(self, copies: tuple[PageCopy, ...]) -> Forks:
        """Make the copies; return the pages that hold a fork then, and its positions in each."""
        held, window_held, state_held = self._held(), self._window_held(), self._state_held()
        for copy in copies:
            if copy.pool == "state":
                self._states.copy(copy, state_held)
            elif copy.pool == "window":
                self._window_pages.copy(copy, window_held)
            else:
                self._pages.copy(copy, held)
        last = {(copy.pool, copy.target): copy for copy in copies if copy.kind != "save"}
        forks: Forks = {"full": {}, "window": {}, "state": {}}
        for (pool, page), copy in last.items():
            if copy.kind == "fork":
                forks[pool][page] = copy.num_positions
        return forks

    def _start(self, start: SequenceStart, forks: Forks) -> None:
        """Add a sequence and check what it starts on, once the copies of the plan are made."""
        assert start.seq_id not in self._sequences, f"sequence {start.seq_id} runs already"
        num_pages = -(-start.num_cached_tokens // self._page_size)
        assert len(start.pages) == num_pages, (
            f"{len(start.pages)} pages for {start.num_cached_tokens} cached tokens"
        )
        owned = self._own(start, start.pages, forks["full"], self._held())
        adapter = None
        if start.slot is not None:
            adapter = self._slots[start.slot]
            assert adapter is not None, f"sequence {start.seq_id} uses empty slot {start.slot}"
        tokens, entries = self._read(start, adapter)
        expected = tokens if start.sampling.needs_history else []
        assert list(start.history) == expected, f"sequence {start.seq_id}: wrong history"
        window = FakeWindow(
            self._window_pages, self._page_size, self._window, start, entries, num_pages
        )
        window.owned = self._own(start, start.window_pages, forks["window"], self._window_held())
        content = entries[-1].content if entries else _root(adapter)
        self._start_state(start, content, forks["state"])
        self._sequences[start.seq_id] = _Sequence(
            slot=start.slot,
            adapter=adapter,
            sampling=start.sampling,
            pages=list(start.pages),
            owned=owned,
            tokens=tokens,
            content=content,
            num_prompt_tokens=start.num_prompt_tokens,
            computed_from=start.num_cached_tokens,
            window=window,
            state_page=start.state_page,
        )

    def _start_state(self, start: SequenceStart, content: bytes, forks: dict[int, int]) -> None:
        """Check the state that a sequence starts with, which it may change."""
        who, page = f"sequence {start.seq_id}", start.state_page
        assert (page is not None) == self._has_states, f"{who} starts on state page {page}"
        if page is None:
            return
        assert page not in self._state_held(), f"{who} starts on a state that another one has"
        if start.num_cached_tokens == 0:
            self._states[page] = FakeState(0, content)
        else:
            assert page in forks, f"{who} starts on a state that is no copy"
        expected = FakeState(start.num_cached_tokens, content)
        assert self._states[page] == expected, f"{who} starts on a state of something else"

    def _own(
        self,
        start: SequenceStart,
        pages: tuple[int, ...],
        forks: dict[int, int],
        held: set[int],
    ) -> set[int]:
        """Return the page that a sequence starts within, which no other may have."""
        rest = start.num_cached_tokens % self._page_size
        if rest == 0 or not pages:
            return set()
        page = pages[-1]
        where = f"sequence {start.seq_id} starts {rest} positions into page {page}"
        assert forks.get(page) == rest, f"{where}, which was not forked for it"
        assert page not in held, f"{where}, which another one has"
        return {page}

    def _read(self, start: SequenceStart, adapter: str | None) -> tuple[list[int], list[Entry]]:
        """Return the tokens in cached pages, each checked to be what this sequence would write."""
        tokens: list[int] = []
        entries: list[Entry] = []
        content = _root(adapter)
        for page in start.pages:
            num_positions = min(self._page_size, start.num_cached_tokens - len(tokens))
            for offset, entry in enumerate(self._pages.read(page, num_positions)):
                where = f"sequence {start.seq_id}: cached page {page} offset {offset}"
                assert entry is not None, f"{where} was never computed"
                content = _hash(content, entry.token_id)
                assert content == entry.content, f"{where} is of another prefix or adapter"
                tokens.append(entry.token_id)
                entries.append(entry)
        return tokens, entries

    def _give_out(self, plan: Plan) -> None:
        """Check that no sequence holds the new pages, and wipe them."""
        for pages, held, new_pages in (
            (self._pages, self._held(), [page for c in plan.chunks for page in c.new_pages]),
            (
                self._window_pages,
                self._window_held(),
                [page for chunk in plan.chunks for page in chunk.new_window_pages],
            ),
        ):
            assert len(set(new_pages)) == len(new_pages), "a page is given out twice"
            for page in new_pages:
                assert page not in held, f"page {page} is given out while a sequence holds it"
                pages.clear(page)

    def _state_held(self) -> set[int]:
        """Return the state pages of all running sequences."""
        pages = (sequence.state_page for sequence in self._sequences.values())
        return {page for page in pages if page is not None}

    def _window_held(self) -> set[int]:
        """Return the window pages that some sequence's next positions see."""
        return {page for sequence in self._sequences.values() for page in sequence.window.held()}

    def _held(self) -> set[int]:
        """Return the pages of all running sequences."""
        return {page for sequence in self._sequences.values() for page in sequence.pages}

    def _run(self, chunk: Chunk) -> SampledToken | PooledPrompt | int | None:
        """Write a chunk's positions and sample its token, or pool its prompt, if it does.

        A sequence whose grammar can be followed no further is returned in place of its token.
        """
        assert chunk.seq_id in self._sequences, f"sequence {chunk.seq_id} has not started"
        sequence = self._sequences[chunk.seq_id]
        assert sequence.sampling.pooling != "mean" or sequence.computed_from == 0, (
            "read, not computed"
        )
        assert chunk.start == len(sequence.tokens), (
            f"sequence {chunk.seq_id}: chunk at {chunk.start}, not {len(sequence.tokens)}"
        )
        assert chunk.token_ids, f"sequence {chunk.seq_id}: empty chunk"
        sequence.pages += chunk.new_pages
        sequence.owned.update(chunk.new_pages)
        sequence.window.grow(chunk)
        if sequence.state_page is not None:
            expected = FakeState(chunk.start, sequence.content)
            found = self._states[sequence.state_page]
            assert found == expected, f"sequence {chunk.seq_id}: its state is of something else"
        for token_id in self._known(sequence, chunk):
            index, offset = divmod(len(sequence.tokens), self._page_size)
            assert index < len(sequence.pages), f"sequence {chunk.seq_id}: too few pages"
            page = sequence.pages[index]
            assert page in sequence.owned, f"sequence {chunk.seq_id} writes shared page {page}"
            sequence.content = _hash(sequence.content, token_id)
            sequence.tokens.append(token_id)
            entry = Entry(token_id, sequence.content)
            self._pages.write(page, offset, entry)
            sequence.window.write(entry)
        if sequence.state_page is not None:
            self._states[sequence.state_page] = FakeState(len(sequence.tokens), sequence.content)
        sequence.sampled = None
        if not chunk.samples:
            return None
        if pooling := sequence.sampling.pooling:
            return PooledPrompt(chunk.seq_id, _pooled(sequence.content, pooling))
        token = _sample(sequence.content, sequence.sampling, self._vocab_size)
        forced: tuple[int, ...] = ()
        token_id = token.token_id
        if sequence.sampling.grammar:
            output = sequence.tokens[sequence.num_prompt_tokens :]
            forced = fake_forced(output, self._vocab_size)
            token_id = forced[0] if forced else token_id
            fails = sequence.sampling.grammar == FAILING_GRAMMAR and not forced
            if fails and len(output) >= FAILS_AFTER:
                sequence.sampled = 0
                return chunk.seq_id
            forced = fake_forced([*output, token_id], self._vocab_size)
            if sequence.sampling.num_logprobs is not None:
                forced = ()
        sequence.sampled = token_id
        return SampledToken(chunk.seq_id, token_id, token.logprob, token.top_logprobs, forced)

    def _score(self, chunk: Chunk) -> PromptLogprobs:
        """Score a chunk's targets, each by the tokens before it."""
        sequence = self._sequences[chunk.seq_id]
        stop = min(chunk.start + len(chunk.token_ids), sequence.num_prompt_tokens - 1)
        first = stop - len(chunk.targets)
        assert chunk.start <= first, f"targets of {chunk.seq_id} are not in its chunk"
        known = [*sequence.tokens, *chunk.token_ids]
        following = (*chunk.token_ids, *chunk.targets[-1:])[first + 1 - chunk.start :]
        assert following[: len(chunk.targets)] == chunk.targets, "targets are not what follows"
        content, scores = _root(sequence.adapter), []
        for position, token_id in enumerate(known[:stop]):
            content = _hash(content, token_id)
            if position >= first:
                scores.append(_score(content, chunk.targets[position - first]))
        return PromptLogprobs(chunk.seq_id, tuple(scores))

    def _known(self, sequence: _Sequence, chunk: Chunk) -> tuple[int, ...]:
        """Return the tokens of a chunk, also one that was planned before its token was known."""
        if PENDING_TOKEN not in chunk.token_ids:
            return chunk.token_ids
        assert len(chunk.token_ids) == 1, f"sequence {chunk.seq_id}: not all tokens are known"
        assert sequence.sampled is not None, (
            f"sequence {chunk.seq_id} sampled nothing in the step before"
        )
        return (sequence.sampled,)

    def _check_unused(self, slot: int) -> None:
        users = [i for i, sequence in self._sequences.items() if sequence.slot == slot]
        assert not users, f"slot {slot} changes while sequences {users} use it"
