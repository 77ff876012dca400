"""One tensor-parallel rank, the worker of vLLM and SGLang: takes plan frames, runs them, answers.

Owns the rank's memory and the end of its chain of plans. A plan may be started while the device
is at the one before it: the tokens that one samples stay on the device. Runs in any process or
thread, without Ray.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.interface import Readback
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator, LeavingOnFailure
from worker.engine.kv_memory import measured_pages
from worker.engine.loaded_model import load_model
from worker.engine.pooling import PoolingChunk, PromptPooler
from worker.engine.prompt_scorer import PromptScorer, Target
from worker.engine.sequences import (
    RunningSequence,
    SequenceTable,
    build_input_batch,
    draws,
    hidden_places,
    pending_sequences,
)
from worker.engine.step_output import NO_PROMPTS, PromptOutput, build_step_output
from worker.engine.step_server import StartedStep
from worker.grammar import GrammarVocabulary
from worker.lora.shard import AdapterShard
from worker.model_config import check_length
from worker.model_config_reader import read_model_config
from worker.models.forward_batch import InputBatch
from worker.pools import NO_PAGES, PageCounts
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Plan,
    RankConfig,
    RankInfo,
    SamplingParams,
    StepReply,
    decode_plan,
)
from worker.runners.model_runner import ModelRunner, model_runner_for
from worker.sampling.grammar_masks import GrammarMasks
from worker.sampling.pending_tokens import PendingTokens
from worker.sampling.sampler import SampledRows, Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling
from worker.token_mask import Mask
from worker.weights.loader import release_free_heap

# That between them take every way through a sampler's kernels.
_WARM_UP_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, num_logprobs=5, repetition_penalty=1.1),
    SamplingParams(top_p=0.9, top_k=20, logit_bias=((0, 1.0),), allowed_tokens=b"\xff"),
)
PREPARE_SECONDS = 0.05  # that a compiling grammar keeps loads of adapters waiting at a time


class Rank:
    """Runs plans. Call `load`, then `allocate`, then `start` as often as there are plans.

    Adapters may be loaded while steps run, into slots that no running sequence uses.
    """

    def __init__(self, config: RankConfig, group: Communicator) -> None:
        assert (group.rank, group.size) == (config.rank, config.tp), "another rank's group"
        self._config = config
        self._group = group
        self._device = torch.device(config.device)
        self._leaving_on_failure = LeavingOnFailure(group)
        self._digest = GENESIS
        self._last_step = 0

    def load(self) -> RankInfo:
        """Load this rank's slices of the weights and return how many pages its memory can hold.

        Raises:
            FileNotFoundError: if the model directory lacks a file.
            ValueError: if the model cannot be served, or not with this configuration.
        """
        config, model_dir = self._config, Path(self._config.model_dir)
        model = read_model_config(model_dir)
        check_length(model, config.max_model_len)
        # First: it is made beside the weights, and what that takes meanwhile is given back.
        vocabulary = partial(GrammarVocabulary, model_dir, model.vocab_size, model.eos_token_ids)
        self._grammars = GrammarMasks(vocabulary) if config.rank == 0 else None
        loaded = self._loaded = load_model(config, model, self._group)
        self._kernels, self._model, self._bank = loaded.kernels, loaded.model, loaded.bank
        self._sampler = Sampler(self._kernels)
        self._pending = PendingTokens(self._group, self._kernels, self._device)
        return loaded.info()

    def measure_pages(self) -> PageCounts:
        """Return how many pages a GPU has room for beside all else; all ranks at the same time.

        Raises:
            ValueError: if there is room for none.
        """
        return measured_pages(self._loaded, self._new_runner, self._sampler)

    def _new_runner(self, cache: KVCache) -> ModelRunner:
        config = self._config
        return model_runner_for(
            self._device,
            self._kernels,
            self._group,
            self._model,
            cache,
            self._bank,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_lora_rank=config.max_lora_rank,
        )

    def allocate(self, pages: PageCounts, host_pages: PageCounts = NO_PAGES) -> None:
        """Make all pages, on the device and in host memory; as many on every rank."""
        release_free_heap()  # what loading left
        if not self._kernels.uses_torch_threads:
            # Those would be woken, in turns with our own, for rows that one computes sooner.
            torch.set_num_threads(1)
        config = self._config
        self._cache = self._loaded.new_cache(pages, host_pages)
        self._runner = self._new_runner(self._cache)
        self._pooler = PromptPooler(config.page_size, self._kernels)
        self._scorer = PromptScorer(self._model, self._bank, self._kernels)
        self._table = SequenceTable(
            page_size=config.page_size,
            pages=pages,
            host_pages=host_pages,
            max_model_len=config.max_model_len,
            window=self._loaded.kinds.window,
        )

    def warm_up(self) -> None:
        """Do what the first steps would wait for, such as compiling; all ranks at the same time."""
        output = self._runner.warm_up()
        if output is None or output.logits is None:
            return
        with torch.inference_mode():
            for params in _WARM_UP_SAMPLING:
                sampling = SequenceSampling.of(params)
                history = [0] if sampling.needs_history else []
                request = SampleRequest(0, sampling, 1, 1, history)
                sampled = self._sampler.sample(output.logits, [request])
                if sampled is not None:
                    sampled.readback.read()

    def load_adapter(
        self,
        slot: int,
        adapter: str,
        weights: Sequence[float],
        shards: Sequence[AdapterShard],
    ) -> int:
        """Put an adapter into a slot that no running sequence uses, in place of what it held.

        Args:
            slot: where to.
            adapter: its digest, or several with weights if it is a sum.
            weights: of its parts, 1 for a single adapter.
            shards: of its parts in the same order, each cut for this rank.

        Returns:
            The bytes that it holds on the device.

        Raises:
            UnusableAdapter: if it cannot be computed; the slot keeps what it held.
        """
        return self._bank.load(slot, adapter, weights, shards)

    def clear_slot(self, slot: int, adapter: str) -> None:
        """Empty a slot that no running sequence uses, unless it holds another adapter by now."""
        if self._bank.adapter(slot) == adapter:
            self._bank.clear(slot)

    def watch_prompt_logits(self, watch: Callable[[Tensor], None]) -> None:
        """Have the logits heard that prompts' log-probabilities are made of, once it has pages."""
        self._scorer.watch = watch

    def prepare_grammar(self, grammar: str) -> bool:
        """Compile a grammar away from the steps; False: not yet, ask again."""
        assert self._grammars is not None, "rank 0 draws"
        return self._grammars.prepare(grammar, PREPARE_SECONDS)

    def step(self, frame: bytes) -> StepReply:
        """Start the plan in a frame and wait for its end; raises what `start` does."""
        return self.start(frame).reply()

    def start(self, frame: bytes) -> StartedStep:
        """Queue the plan in a frame on the device, behind the plans before it.

        The output is in rank 0's reply; each rank's comes when its device is done. After any
        exception, also from `reply`, the rank has left its group and must be replaced.

        Raises:
            PlanMismatch: before anything is computed, if the plan does not continue this rank's
                chain.
            GroupBroken: if another rank fails.
        """
        with self._leaving_on_failure:
            plan, self._digest = decode_plan(frame, self._digest, self._last_step + 1)
            self._last_step = plan.step
            with torch.inference_mode():
                sampled, prompts = self._run(plan)
                if sampled is None:  # no token is read, but the end of the step is waited for
                    end = self._kernels.start_readback((), self._device)
                else:
                    end = sampled.readback
        return StartedStep(end.is_ready, partial(self._reply, plan.step, end, sampled, prompts))

    def _reply(
        self, step: int, end: Readback, sampled: SampledRows | None, prompts: PromptOutput
    ) -> StepReply:
        with self._leaving_on_failure:
            end.read()
            is_first = self._config.rank == 0
            if not is_first:
                return StepReply(step)
            return StepReply(step, build_step_output(step, sampled, self._grammars, prompts))

    def _run(self, plan: Plan) -> tuple[SampledRows | None, PromptOutput]:
        pending = pending_sequences(plan.chunks)
        self._table.apply(plan)
        self._follow_grammars(plan)
        self._cache.copy(plan.copies)
        for seq_id in plan.ends:
            self._pooler.end(seq_id)
        if not plan.chunks:
            self._pending.put((), None)
            return None, NO_PROMPTS
        rows = build_input_batch(plan.chunks, self._table)
        for run in rows.runs:
            assert self._bank.adapter(run.slot) is not None, f"slot {run.slot} is empty"
        logits, hidden = self._runner.run(rows, self._pending.on_device(pending))
        if self._config.rank == 0:  # no other rank samples, and so needs a history
            self._complete_histories(pending)
        requests = self._sample_requests(plan)
        sampled = None if logits is None else self._sampler.sample(logits, requests)
        self._pending.put([request.seq_id for request in requests], sampled)
        return sampled, NO_PROMPTS if hidden is None else self._prompt_output(plan, rows, hidden)

    def _prompt_output(self, plan: Plan, rows: InputBatch, hidden: Tensor) -> PromptOutput:
        """Make what prompts ask for of the final hidden states [R, H] of a step."""
        targets: list[Target] = []
        pooled: list[PoolingChunk] = []
        first = 0
        for chunk in plan.chunks:
            sequence = self._table[chunk.seq_id]
            count, sampling = len(hidden_places(chunk, sequence)), sequence.sampling.params
            if chunk.targets:
                num_best = sampling.prompt_logprobs or 0
                targets += (
                    Target(chunk.seq_id, row, token_id, num_best)
                    for row, token_id in enumerate(chunk.targets, first)
                )
            elif count:
                head = self._score_head(sequence.slot) if sampling.pooling == "classify" else None
                states = hidden[first : first + count]
                pooled.append(PoolingChunk(chunk, sampling.pooling, states, head))
            first += count
        assert first == len(hidden), "hidden states that nobody asked for"
        scored = self._scorer.score(hidden, rows, targets) if targets else None
        is_first = self._config.rank == 0
        return PromptOutput(self._pooler.pool(pooled) if is_first else None, scored)

    def _score_head(self, slot: int | None) -> Tensor | None:
        """Return the head [labels, H] that prompts of a slot are classified by: its own, if any."""
        own = None if slot is None else self._bank.score_head(slot)
        return self._model.score_head if own is None else own

    def _follow_grammars(self, plan: Plan) -> None:
        """Let masks be computed while the step is, as far as its tokens are known."""
        grammars = self._grammars
        if grammars is None:
            return
        for seq_id in plan.ends:
            grammars.end(seq_id)
        for start in plan.starts:
            if start.sampling.grammar:
                grammars.start(start.seq_id, start.sampling.grammar)
        if not self._table.with_history:  # who follows a grammar has one
            return
        sequences = self._table.of_chunks(plan.chunks)
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            if sequence.sampling.params.grammar and PENDING_TOKEN not in chunk.token_ids:
                self._feed_grammar(chunk.seq_id)
        grammars.begin()

    def _feed_grammar(self, seq_id: int) -> None:
        """Take a sequence's grammar to the end of the tokens that are known."""
        sequence = self._table[seq_id]
        assert self._grammars is not None, "rank 0 draws"
        self._grammars.feed(seq_id, sequence.history, sequence.num_prompt_tokens)

    def _complete_histories(self, pending: Sequence[int]) -> None:
        """Put pending tokens into the histories that sampling needs; this alone waits for them."""
        if not self._table.with_history:
            return
        for seq_id in filter(self._table.with_history.__contains__, pending):
            sequence = self._table[seq_id]
            sequence.history[-1] = self._pending.on_host(seq_id)
            if sequence.sampling.params.grammar:
                self._feed_grammar(seq_id)
        if self._grammars is not None:
            self._grammars.begin()

    def _sample_requests(self, plan: Plan) -> list[SampleRequest]:
        sequences = self._table.of_chunks(plan.chunks)
        # By place: a step makes hundreds, and names take as long again.
        return [
            SampleRequest(
                chunk.seq_id,
                sequence.sampling,
                sequence.num_tokens,
                sequence.num_prompt_tokens,
                sequence.history,
                *(self._guidance(chunk.seq_id, sequence) if sequence.sampling.is_guided else ()),
            )
            for chunk, sequence in zip(plan.chunks, sequences, strict=True)
            if draws(chunk, sequence)
        ]

    def _guidance(self, seq_id: int, sequence: RunningSequence) -> tuple[Mask | None, int | None]:
        """Return what a grammar allows next, and which token a budget of thoughts wants."""
        if self._grammars is None:  # on another rank than 0, which draws
            return None, None
        has_grammar = bool(sequence.sampling.params.grammar)
        allowed = self._grammars.mask(seq_id) if has_grammar else None
        return allowed, self._forced(seq_id, sequence)

    def _forced(self, seq_id: int, sequence: RunningSequence) -> int | None:
        """Return the token that a budget of thoughts wants next, if any."""
        budget = sequence.sampling.params.thinking
        if budget is None:
            return None
        assert self._grammars is not None, "rank 0 draws"
        return self._grammars.forced(seq_id, budget, sequence.history, sequence.num_prompt_tokens)
