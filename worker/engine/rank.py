"""One tensor-parallel rank: takes plan frames, asks its device for them in order and answers.

Owns the rank's memory and its place in the chain of plans. A plan may be started while the device
is at the one before it: the tokens that one draws stay there. Runs in any process or thread; knows
nothing of Ray, sockets or of how plans are made.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from kernels.dispatch import Fetched, kernels_for
from worker.cache.host_memory import give_back
from worker.cache.kv_cache import KVCache, page_num_bytes
from worker.distributed.parallel import Communicator
from worker.engine.config import RankConfig
from worker.engine.self_test import unsteady_linears
from worker.engine.sequences import SequenceTable
from worker.engine.started_step import StartedStep
from worker.engine.step_layout import drawing_sequences, lay_out
from worker.lora.adapter_bank import AdapterBank, bank_for
from worker.lora.base_weights import BaseWeights
from worker.lora.shard import AdapterShard
from worker.model_config import check_length
from worker.model_config_reader import read_model_config
from worker.models.llama import Model
from worker.protocol import GENESIS, Plan, RankInfo, StepReply, decode_plan
from worker.runners.runner import Runner, runner_for
from worker.sampling.pending_tokens import DrawnTokens
from worker.sampling.row_logits import MAX_VOCABULARY
from worker.sampling.sampler import DrawnRows, Sampler, SampleRequest
from worker.sampling.step_output import output_of
from worker.weights.loader import load_weights
from worker.weights.partition import partition

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Rank:
    """Runs plans. Call `load`, then `allocate`, then `start` as often as there are plans.

    Adapters may be loaded while steps run, into slots that no running sequence uses.
    """

    def __init__(self, config: RankConfig, group: Communicator) -> None:
        assert (group.rank, group.size) == (config.rank, config.tp), "another rank's group"
        self._config = config
        self._group = group
        self._device = torch.device(config.device)
        self._dtype = _DTYPES[config.dtype]
        self._digest = GENESIS
        self._last_step = 0

    def load(self) -> RankInfo:
        """Load this rank's slices of the weights and say how many pages its memory can hold.

        Raises:
            FileNotFoundError: if the model directory lacks a file.
            ValueError: if the model cannot be served, or not with this configuration.
        """
        config = self._config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._kernels = kernels_for(
            self._device, config.deterministic, config.tp, torch.get_num_threads()
        )
        self._sampler = Sampler(self._kernels)
        self._drawn = DrawnTokens(self._group, self._kernels, self._device)
        model_dir = Path(config.model_dir)
        self._model_config = read_model_config(model_dir)
        check_length(self._model_config, config.max_model_len)
        assert self._model_config.vocab_size <= MAX_VOCABULARY, "token ids are told as float32"
        self._part = partition(self._model_config, config.tp, config.rank)
        weights = load_weights(
            model_dir,
            self._model_config,
            self._part,
            self._dtype,
            self._device,
            self._kernels.prepare_linear,
        )
        self._model = Model(
            self._model_config,
            self._part,
            weights,
            self._group,
            self._kernels,
            config.max_model_len,
        )
        self._bank = self._empty_bank(model_dir)
        page_bytes = page_num_bytes(
            self._model_config.num_layers,
            len(self._part.kv_heads),
            config.page_size,
            self._model_config.head_dim,
            self._dtype,
        )
        return RankInfo(
            rank=config.rank,
            pid=os.getpid(),
            node_id="",
            max_pages=config.kv_memory_bytes // page_bytes,
            max_host_pages=config.kv_host_memory_bytes // page_bytes,
            page_bytes=page_bytes,
            weight_bytes=self._model.num_bytes,
            device=config.device,
            products=self._kernels.products,
            unsteady=unsteady_linears(weights, self._kernels) if self._is_steady else (),
        )

    def _empty_bank(self, model_dir: Path) -> AdapterBank:
        return bank_for(
            self._kernels,
            self._part,
            num_layers=self._model_config.num_layers,
            num_slots=self._config.num_slots,
            dtype=self._dtype,
            device=self._device,
            base=BaseWeights(model_dir, self._model_config, self._part, self._dtype),
        )

    @property
    def _is_steady(self) -> bool:
        """Whether a row's bits are said not to depend on its batch."""
        return self._device.type == "cpu" or self._config.deterministic

    def allocate(self, num_pages: int, num_host_pages: int = 0) -> None:
        """Make the KV pages, on the device and in host memory; as many on every rank."""
        give_back()  # what loading left
        config = self._config
        self._cache = KVCache(
            num_layers=self._model_config.num_layers,
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            num_kv_heads=len(self._part.kv_heads),
            page_size=config.page_size,
            head_dim=self._model_config.head_dim,
            dtype=self._dtype,
            device=self._device,
            kernels=self._kernels,
        )
        self._runner: Runner = runner_for(
            self._device,
            self._kernels,
            self._group,
            self._model,
            self._cache,
            self._bank,
            config.max_model_len,
        )
        self._table = SequenceTable(
            page_size=config.page_size,
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            max_model_len=config.max_model_len,
        )

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

    def step(self, frame: bytes) -> StepReply:
        """Start the plan in a frame and wait for its end; raises what `start` does."""
        return self.start(frame).reply()

    def start(self, frame: bytes) -> StartedStep:
        """Ask the device for all that the plan in a frame wants, behind the plans before it.

        The output is in rank 0's reply; each rank's comes when its device is done. After any
        exception, also from `reply`, the rank has left its group and must be replaced.

        Raises:
            PlanMismatch: before anything is computed, if the plan does not continue this rank's
                chain.
            GroupBroken: if another rank fails.
        """
        with self._leaving_on_failure():
            plan, self._digest = decode_plan(frame, self._digest, self._last_step + 1)
            self._last_step = plan.step
            with torch.inference_mode():
                drawn = self._run(plan)
                self._drawn.note([c.seq_id for c in plan.chunks if c.samples], drawn)
                end = self._kernels.fetch((), self._device) if drawn is None else drawn.fetched
        return StartedStep(end.is_here, partial(self._reply, plan.step, end, drawn))

    @contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._group.close)  # on failure the other ranks must not wait for us
            yield
            stack.pop_all()

    def _reply(self, step: int, end: Fetched, drawn: DrawnRows | None) -> StepReply:
        with self._leaving_on_failure():
            end.read()
            return StepReply(step, output_of(step, drawn) if self._config.rank == 0 else None)

    def _run(self, plan: Plan) -> DrawnRows | None:
        drawing = drawing_sequences(plan.chunks)
        new_pages = self._table.apply(plan)
        self._cache.copy(plan.copies)
        self._cache.clear(new_pages)
        if not plan.chunks:
            return None
        rows = lay_out(plan.chunks, self._table)
        for run in rows.runs:
            assert self._bank.adapter(run.slot) is not None, f"slot {run.slot} is empty"
        found = self._runner.run(rows, self._drawn.of(drawing))
        if self._config.rank == 0:  # nobody else draws, and so looks at a history
            self._complete_histories(drawing)
        if found is None:
            return None
        return self._sampler.sample(found, self._sample_requests(plan))

    def _complete_histories(self, drawing: Sequence[int]) -> None:
        """Put drawn tokens into the histories that sampling needs; this alone waits for them."""
        for seq_id in drawing:
            sequence = self._table[seq_id]
            if sequence.sampling.needs_history:
                sequence.history[-1] = self._drawn.told(seq_id)

    def _sample_requests(self, plan: Plan) -> list[SampleRequest]:
        sequences = [(c.seq_id, self._table[c.seq_id]) for c in plan.chunks if c.samples]
        return [
            SampleRequest(
                seq_id=seq_id,
                params=sequence.sampling,
                position=sequence.num_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                history=sequence.history,
            )
            for seq_id, sequence in sequences
        ]
