"""Messages between the scheduler and the ranks: how a rank runs, what a step does, its output.

Owns the encoding of a plan (MessagePack) and the rolling digest that ties each plan to all plans
before it. Must stay free of torch and Ray: the control plane imports it.
Messages are acyclic and frozen, so the garbage collector need not look at them (gc=False).
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from worker.errors import PlanMismatch
from worker.pools import KVCacheDtype, PageCounts, PoolName

DIGEST_BYTES = 32
GENESIS = bytes(DIGEST_BYTES)  # the digest "before step 1" of a freshly started group of ranks
# In place of a token that the step before samples, in a plan that was made before its reply came.
PENDING_TOKEN = -1

# What a prompt's final hidden states become: an embedding, of its last token or the mean of all, or
# the logits of a classification head behind its last token.
Pooling = Literal["", "last", "mean", "classify"]


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many tokens of thought an answer may have before it is made to close it."""

    num_tokens: int
    opening: str  # the tag that opens a thought at the beginning of an answer
    closing: str  # the tag that closes it
    closing_tokens: tuple[int, ...]  # that say it
    is_open: bool  # the answer begins in a thought that its prompt has opened


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the next token of one sequence is sampled from its logits; the defaults are OpenAI's.

    A token is a function of (logits, these parameters, seed, position): nothing else.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # `held_back` tokens cannot be among the first `min_tokens` output tokens
    held_back: tuple[int, ...] = ()
    num_logprobs: int | None = None  # None: no log-probabilities; 0: the sampled token's only
    grammar: str = ""  # of the output, as llguidance reads it; "": anything
    pooling: Pooling = ""  # what the output is made of, in place of tokens
    # Log-probabilities of the prompt's tokens, from the second on, and of so many of the best
    # others; None: none.
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens that the output must not end in
    # A bit for each token that may be drawn, the lowest id in the lowest bit; b"": all may.
    allowed_tokens: bytes = b""
    thinking: ThinkingBudget | None = None  # None: an answer may think as long as it likes
    logprob_token_ids: tuple[int, ...] = ()  # whose log-probabilities come in place of the best

    @property
    def has_penalties(self) -> bool:
        """Whether tokens are less likely, or more, because they came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether a rank must know the tokens so far to sample the next one."""
        if self.has_penalties or self.grammar or self.thinking is not None:
            return True
        return any(len(word) > 1 for word in self.bad_words)


class SequenceStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that enters the running set: new, or back after a preemption."""

    seq_id: int
    slot: int | None  # adapter slot; None: the base model
    sampling: SamplingParams
    num_prompt_tokens: int  # positions from here on hold output tokens
    pages: tuple[int, ...]  # just enough for num_cached_tokens; full ones are shared, read only
    num_cached_tokens: int  # positions whose K/V those pages hold once the plan's copies are done
    history: tuple[int, ...]  # tokens [0, num_cached_tokens) if sampling.needs_history, else empty
    # The last of its pages in layers with a window: at least those that its next position sees.
    window_pages: tuple[int, ...] = ()
    # Where its state is, which every chunk brings up to date; the first one, from position 0 on,
    # does not read what is there. None: no layer has one.
    state_page: int | None = None


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, start + len(token_ids)) of one running sequence, computed in this step."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]  # or (PENDING_TOKEN,)
    new_pages: tuple[int, ...]  # appended to the page table before the step; their content is stale
    samples: bool  # sample the token at position start + len(token_ids), or pool what came before
    # The last of the prompt's tokens behind this chunk's first row: those whose log-probabilities
    # are wanted, each by the row before it. The last of them follows the chunk, unless the prompt
    # ends in it.
    targets: tuple[int, ...] = ()
    new_window_pages: tuple[int, ...] = ()  # likewise in layers with a window: as many


class PageCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one page has of a pool's layers, moved between or within tiers before the chunks run.

    "save" copies a device page to a host page, "restore" a host page to a device page, "fork" a
    device page to another one: of that, the first `num_positions` positions, and zeros behind them.
    A page of states is copied whole.
    """

    kind: Literal["save", "restore", "fork"]
    source: int
    target: int
    num_positions: int  # page_size unless a fork
    pool: PoolName = "full"


class Plan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every rank must do in one step. Equal bytes mean equal work on every rank.

    Order of effect: `ends` drop rank state, `starts` create it, `copies` are made one after the
    other, the new pages of `chunks` are cleared, then all `chunks`, maybe none, run as one batch.
    A page may be a target and later a source, or be saved and then given out, in one plan. A window
    page may be written over as soon as the next position of its sequence does not see it.
    """

    step: int  # 1, 2, 3, ... in the life of a group of ranks
    ends: tuple[int, ...]  # sequences that finished, were aborted or were preempted
    starts: tuple[SequenceStart, ...]
    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The token sampled for one sequence; log-probabilities are of the unmodified logits."""

    seq_id: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first
    # That the grammar leaves no choice about: they follow, without being sampled. None where their
    # log-probabilities are asked for.
    forced: tuple[int, ...] = ()


class PooledPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a prompt's final hidden states, behind the final norm, have become."""

    seq_id: int
    values: bytes  # [H], or [labels] of a head, float32, little-endian


# A token's log-probability, (token id, log-probability) of the best, best first, and how many
# tokens are no less likely than it: its rank among all, from 1.
TokenLogprobs = tuple[float, tuple[tuple[int, float], ...], int]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probabilities of a chunk's targets, in their order."""

    seq_id: int
    of_targets: tuple[TokenLogprobs, ...]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What rank 0 answers: one token for each chunk that samples, in plan order.

    `failed` names the sequences that have none: their logits, or what was pooled of them, were not
    finite, or their grammar could be followed no further, for the reason in `grammar_errors`.
    """

    step: int
    tokens: tuple[SampledToken, ...]
    failed: tuple[int, ...] = ()
    grammar_errors: tuple[tuple[int, str], ...] = ()  # by sequence
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # in plan order
    # These two are for operators; nothing decides by them.
    num_masks: int = 0  # of grammars, that tokens were drawn by
    num_late_masks: int = 0  # that the ranks had to wait for
    pooled: tuple[PooledPrompt, ...] = ()  # of the other chunks that sample, in plan order


class StepReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank's answer to one plan frame; `output` only from rank 0, `error` if the step failed."""

    step: int
    output: StepOutput | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """How one rank runs; the same on all ranks of a group but for `rank` and `device`."""

    model_dir: str
    revision: str | None = None  # where `model_dir` is a hub id yet: its commit
    rank: int
    tp: int
    dtype: Literal["bfloat16", "float32"]
    device: str = "cpu"
    page_size: int = 64  # positions
    kv_memory_bytes: int | None  # None: what a GPU has left
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that may be in use then
    adapter_memory_bytes: int = 0  # of that, for adapters in slots
    kv_host_memory_bytes: int = 0  # for pages that the device has no room for; 0: none
    num_slots: int
    max_lora_rank: int = 64  # of a module of an adapter
    max_model_len: int  # positions that one sequence may have
    max_num_batched_tokens: int = 2048  # rows that one step may have
    max_num_seqs: int = 64  # sequences that run at the same time
    quantization: Literal["int8", "int4"] | None = None  # of linears as they are loaded; None: none
    kv_cache_dtype: KVCacheDtype = "auto"  # of K and V in their pages; auto: `dtype`
    lora_dtype: Literal["auto", "int8"] = "auto"  # of linears' A and B in slots; auto: `dtype`
    # On a GPU too, a row's bits do not depend on its batch; in int8, its linears' not on tp.
    deterministic: bool = False
    num_threads: int | None  # compute threads of this process; None: torch's own choice


class RankInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank reports after loading its weights."""

    rank: int
    pid: int
    node_id: str  # "" without Ray
    max_pages: PageCounts | None  # that fit its memory budget together; None: not measured yet
    max_host_pages: PageCounts  # likewise in its budget of host memory; none: no host tier
    page_bytes: int  # of one of layers without a window
    weight_bytes: int
    device: str
    products: str  # by what its matrix products are computed: AMX, AVX-512, torch and the like
    # Linears in which the bits of a row depend on the batch that it is in, on this machine.
    batch_variant_linears: tuple[str, ...] = ()
    window: int = 0  # positions that a row sees in layers with a pool of their own; 0: none has
    window_page_bytes: int = 0
    state_page_bytes: int = 0  # 0: no layer has one


_plan_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(Plan)


def chain(parent: bytes, body: bytes) -> bytes:
    """Return the rolling digest of a plan whose encoded form is `body` after `parent`."""
    return blake2b(parent + body, digest_size=DIGEST_BYTES).digest()


def encode_plan(plan: Plan, parent: bytes) -> tuple[bytes, bytes]:
    """Return (frame, digest): the frame to send to every rank and the new end of the chain."""
    body = _plan_encoder.encode(plan)
    digest = chain(parent, body)
    return digest + body, digest


def decode_plan(frame: bytes, parent: bytes, expected_step: int) -> tuple[Plan, bytes]:
    """Return (plan, digest) after checking that the frame continues the chain.

    Raises:
        PlanMismatch: if the digest or the step number is not the one that must come next.
    """
    digest, body = frame[:DIGEST_BYTES], frame[DIGEST_BYTES:]
    if chain(parent, body) != digest:
        raise PlanMismatch(expected_step, "its digest does not continue the chain of this rank")
    plan = _plan_decoder.decode(body)
    if plan.step != expected_step:
        raise PlanMismatch(expected_step, f"it is numbered {plan.step}")
    return plan, digest
