"""Ranks in threads that give the logits of every position, of prompts with and without adapters."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cluster.adapters.adapter import Adapter
from cluster.adapters.sharding import cut
from kernels.dispatch import kernels_for
from kernels.quantized import QuantizationMethod, Quantizer
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator, SingleRank
from worker.distributed.thread_group import ThreadGroup
from worker.engine.sequences import SequenceTable, build_input_batch
from worker.lora.adapter_bank import LoraDtype, bank_for
from worker.lora.base_weights import BaseWeights
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config
from worker.models.decoder import Model
from worker.pools import KVCacheDtype, PageCounts
from worker.protocol import Chunk, Plan, SamplingParams, SequenceStart
from worker.runners.model_runner import model_runner_for
from worker.weights.loader import load_weights
from worker.weights.partition import partition

PAGE = 16
CPU = torch.device("cpu")
T = TypeVar("T")
Prompt = tuple[int | None, tuple[int, ...]]  # slot and tokens


class LogitRank:
    """One rank: its model and its bank."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        group: Communicator,
        dtype: torch.dtype,
        method: QuantizationMethod | None = None,
        has_exact_sums: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
        lora_dtype: LoraDtype = "auto",
    ) -> None:
        self._kv_cache_dtype = kv_cache_dtype
        self.config = config
        self.dtype = dtype
        self.part = partition(config, group.size, group.rank, has_exact_sums=has_exact_sums)
        self.group = group
        self.kernels = kernels_for(CPU)
        quantizer = None
        if method is not None:
            assert self.kernels.quantized is not None
            quantizer = Quantizer(method, self.kernels.quantized)
        prepare = self.kernels.prepare_linear, self.kernels.prepare_experts, quantizer
        weights = load_weights(path, config, self.part, dtype, CPU, *prepare)
        self.model = Model(config, self.part, weights, group, self.kernels, 256)
        self.bank = bank_for(
            self.kernels,
            self.part,
            num_layers=config.num_layers,
            num_slots=8,
            dtype=dtype,
            device=CPU,
            base=BaseWeights(path, config, self.part, dtype, quantizer),
            lora_dtype=lora_dtype,
        )

    def forward(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """Return the logits of all rows, prompt after prompt, on rank 0."""
        num_pages = [-(-len(tokens) // PAGE) for _, tokens in prompts]
        first_page = list(accumulate(num_pages, initial=0))
        greedy = SamplingParams()
        num_states = len(prompts) if self.config.mixer_layers else 0
        starts = tuple(
            SequenceStart(
                *(i, slot, greedy, len(tokens), (), 0, ()), state_page=i if num_states else None
            )
            for i, (slot, tokens) in enumerate(prompts)
        )
        chunks = tuple(
            Chunk(i, 0, tokens, tuple(range(first_page[i], first_page[i + 1])), True)
            for i, (_, tokens) in enumerate(prompts)
        )
        pages = PageCounts(first_page[-1], state=num_states)
        cache = KVCache(
            num_layers=self.config.num_layers,
            pages=pages,
            num_kv_heads=len(self.part.kv_heads),
            page_size=PAGE,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=CPU,
            kernels=self.kernels,
            state_layers=self.config.mixer_layers,
            state_shapes=() if self.part.mixer is None else self.part.mixer.state_shapes,
            kv_cache_dtype=self._kv_cache_dtype,
        )
        table = SequenceTable(page_size=PAGE, pages=pages, max_model_len=256)
        with torch.inference_mode():
            table.apply(Plan(1, (), starts, chunks))
            rows = build_input_batch(chunks, table)
            sample_rows = [
                row
                for last, (_, tokens) in zip(rows.sample_rows, prompts, strict=True)
                for row in range(last + 1 - len(tokens), last + 1)
            ]
            rows = replace(rows, sample_rows=sample_rows)
            runner = model_runner_for(
                CPU,
                self.kernels,
                self.group,
                self.model,
                cache,
                self.bank,
                max_model_len=256,
                max_num_batched_tokens=2048,
                max_num_seqs=64,
            )
            found = runner.run(rows).logits
            assert found is not None, "every prompt samples"
            return found.whole()


class LogitRanks:
    """All ranks of a model."""

    def __init__(
        self,
        path: Path,
        tp: int,
        dtype: torch.dtype = torch.float32,
        method: QuantizationMethod | None = None,
        has_exact_sums: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
        lora_dtype: LoraDtype = "auto",
    ) -> None:
        self.config = read_model_config(path)
        groups: Sequence[Communicator] = (
            (SingleRank(),) if tp == 1 else ThreadGroup(tp).communicators()
        )
        self._threads = ThreadPoolExecutor(tp)
        self.ranks = [
            LogitRank(
                *(path, self.config, group, dtype, method),
                *(has_exact_sums, kv_cache_dtype, lora_dtype),
            )
            for group in groups
        ]

    def load(self, slot: int, *adapters: Adapter, weights: Sequence[float] = (1.0,)) -> list[int]:
        """Load an adapter, or a sum, on every rank; return the bytes that each holds.

        One rank after the other: none may wait for another.
        """
        name = ",".join(f"{a.digest}:{w}" for a, w in zip(adapters, weights, strict=True))
        shards = [[cut(adapter, rank.part) for adapter in adapters] for rank in self.ranks]
        return [
            rank.bank.load(slot, name, weights, of_rank)
            for rank, of_rank in zip(self.ranks, shards, strict=True)
        ]

    def logits(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Return the logits [tokens, vocabulary] of each prompt, all in one batch."""
        found = self._each(lambda rank: rank.forward(prompts))
        assert found[0] is not None and all(other is None for other in found[1:])
        return list(torch.split(found[0], [len(tokens) for _, tokens in prompts]))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _each(self, call: Callable[[LogitRank], T]) -> list[T]:
        return list(self._threads.map(call, self.ranks))
