"""The GPU's model runner: decode steps as CUDA graphs, all others eagerly.

A decode step of a small model takes less time on the device than Python takes to launch its
kernels; a graph launches them all at once. Batches are padded to the next size of a graph
(warm_up.py), and run eagerly if there is none.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu.attention.paged_prefill import block_rows
from worker.cache.kv_cache import KVCache
from worker.lora.adapter_bank import AdapterBank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch
from worker.runners.capture_sizes import CAPTURE_RANKS, capture_sizes
from worker.runners.gpu_batch import BatchSize, GpuBatch, cut_rows, exact_size
from worker.runners.model_output import ModelOutput
from worker.runners.warm_up import (
    GraphLadder,
    largest_batches,
    product_rows,
    warm_up_batches,
)

Work = Callable[[], Tensor | None]
Capture = Callable[[Work], Work]  # returns what does the same again, into the same tensor

_TOLD_EVERY = 5.0  # seconds of a warm-up
logger = logging.getLogger("topwork.worker")


@dataclass(frozen=True, slots=True)
class _Graph:
    batch: GpuBatch
    replay: Work


class GpuRunner:
    """See `worker.runners.model_runner.ModelRunner`. Ranks decide the same for the same rows."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        bank: AdapterBank,
        device: torch.device,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        capture: Capture | None,
        max_lora_rank: int = 64,
        pins_memory: bool = True,
        ladder: GraphLadder | None = None,
    ) -> None:
        """Make a runner that has captured nothing yet: `warm_up` does, or it has no graphs.

        Args:
            model: this rank's.
            cache: the KV pages.
            bank: the adapters, with a pointer table.
            device: of all these.
            max_model_len: positions that a sequence may have.
            max_num_batched_tokens: rows that a step may have.
            max_num_seqs: sequences that a step may have.
            capture: makes a graph of some work; None: no graphs.
            max_lora_rank: that a module of an adapter may have.
            pins_memory: False only where there is no GPU.
            ladder: the sizes of graphs; None: those that traffic can ask for.
        """
        self._model = model
        self._cache = cache
        self._bank = bank
        self._device = device
        self._capture = capture
        self._max_lora_rank = max_lora_rank
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._prompts = product_rows(model.experts, max_num_batched_tokens)
        self._ladder = ladder or GraphLadder(
            cache.page_size,
            max_model_len,
            has_adapters=bank.num_slots > 0,
            rows=capture_sizes(max_num_seqs),
        )
        self._pins_memory = pins_memory
        self._block_rows = block_rows(model.group_size, model.head_dim)
        self._graphs: dict[BatchSize, _Graph] = {}

    def run(self, rows: InputBatch, pending: Tensor | None = None) -> ModelOutput:
        """See `worker.runners.model_runner.ModelRunner`."""
        logits, hidden = self._run(rows, pending)
        return ModelOutput(None if logits is None else self._model.row_logits(logits), hidden)

    def _run(self, rows: InputBatch, pending: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        cut = cut_rows(rows, self._block_rows)
        exact = exact_size(rows, cut, self._bank, self._cache.page_size)
        graph = self._graph_for(rows, exact, int(cut.lengths.max()))
        if graph is None:
            batch = self._new_batch(exact)
            batch.send(rows, cut, self._cache.page_size, pending)
            batch.clear_new_pages(rows, self._cache)
            return self._model.forward(batch.forward_batch(rows), self._cache, rows.hidden_rows)
        graph.batch.send(rows, cut, self._cache.page_size, pending)
        graph.batch.clear_new_pages(rows, self._cache)
        logits = graph.replay()
        return (None if logits is None else logits[: len(rows.sample_rows)]), None

    def warm_up(self) -> ModelOutput | None:
        """See `worker.runners.model_runner.ModelRunner`."""
        start = told = time.monotonic()
        self.compile_kernels()
        for num_left in self.capture_graphs():
            if time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                logger.info("warm-up: %d graphs captured, %d to come", len(self._graphs), num_left)
        logger.info("warm-up: %d graphs in %.1f s", len(self._graphs), time.monotonic() - start)
        output = None
        for decode in list(self._warm_up_batches())[-1:]:  # goes the way of all decodes
            with torch.inference_mode():
                output = self.run(replace(decode, runs=()))
        return output

    def compile_kernels(self) -> None:
        """Launch every kernel in every way."""
        lora_ranks = CAPTURE_RANKS[:2] if self._ladder.has_adapters else CAPTURE_RANKS[:1]
        with torch.inference_mode():
            self._cache.warm_up()
            for rows in self._warm_up_batches():
                for lora_rank in lora_ranks:
                    self._run_once(rows, lora_rank)

    def capture_graphs(self) -> Iterator[int]:
        """Capture one graph after the other, the largest first; yield how many are to come."""
        sizes = list(self._ladder.all_sizes()) if self._capture is not None else []
        for number, size in enumerate(sizes, 1):
            with torch.inference_mode():
                self._graphs[size] = self._capture_graph(size)
            yield len(sizes) - number

    def run_largest(self) -> ModelOutput:
        """Run batches of which none takes more memory; return logits of all sequences."""
        ladder = self._ladder
        decodes, prompts = largest_batches(
            self._max_num_batched_tokens,
            self._max_num_seqs,
            ladder.max_model_len,
            ladder.page_size,
            self._cache.num_pages.state,
            has_adapters=ladder.has_adapters,
        )
        lora_rank = self._largest_lora_rank() if ladder.has_adapters else 0
        with torch.inference_mode():
            self._cache.warm_up()  # else attention would meet what was in that memory before
            self._run_once(decodes, lora_rank)
            return self._run_once(prompts, lora_rank)

    def _largest_lora_rank(self) -> int:
        """Return the most of a product's modules together, and of a graph."""
        table = self._bank.table
        assert table is not None, "a bank for a GPU keeps a table"
        num_modules = max(map(len, (*table.widths, *table.expert_widths)))
        return max(CAPTURE_RANKS[-1], num_modules * self._max_lora_rank)

    def _warm_up_batches(self) -> Iterator[InputBatch]:
        ladder = self._ladder
        return warm_up_batches(
            self._prompts,
            self._cache.num_pages,
            ladder.page_size,
            ladder.max_model_len,
            has_adapters=ladder.has_adapters,
        )

    def _run_once(self, rows: InputBatch, lora_rank: int) -> ModelOutput:
        """Run a batch eagerly, with LoRA's kernels whatever its slots hold, or without."""
        rows = rows if lora_rank else replace(rows, runs=())
        cut = cut_rows(rows, self._block_rows)
        exact = exact_size(rows, cut, self._bank, self._cache.page_size)
        batch = self._new_batch(replace(exact, max_lora_rank=lora_rank))
        batch.send(rows, cut, self._cache.page_size)
        logits, hidden = self._model.forward(batch.forward_batch(rows), self._cache)
        return ModelOutput(None if logits is None else self._model.row_logits(logits), hidden)

    def _graph_for(self, rows: InputBatch, exact: BatchSize, longest: int) -> _Graph | None:
        """Return the graph of rows of contexts so long, None if they run by themselves."""
        only_decodes = exact.decodes == exact.rows == exact.samples
        if not self._graphs or not only_decodes:
            return None
        assert not rows.hidden_rows, "prompts are pooled, not what follows them"
        if self._bank.embeddings(rows.runs) or self._bank.heads(rows.runs):
            return None
        size = self._ladder.size_for(exact, longest)
        return None if size is None else self._graphs[size]

    def _new_batch(self, size: BatchSize) -> GpuBatch:
        return GpuBatch(size, self._bank, self._device, self._pins_memory, self._cache.pools)

    def _capture_graph(self, size: BatchSize) -> _Graph:
        """Capture a graph of an empty batch, so that the capture writes no page."""
        assert self._capture is not None, "this runner makes no graphs"
        empty = InputBatch([], [0], [], [], [], (), [])
        batch = self._new_batch(size)
        batch.send(empty, cut_rows(empty, self._block_rows), self._cache.page_size)
        # As many samples as rows: how many of them count is known at each replay.
        whole = replace(batch.forward_batch(empty), sample_rows=range(size.samples))
        return _Graph(batch, self._capture(lambda: self._model.forward(whole, self._cache)[0]))


class CudaCapture:
    """Makes CUDA graphs, all in one pool of memory: only one of them runs at a time.

    They share one buffer for their logits, too: one for each graph would add up to tens of
    gigabytes at large vocabularies.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._logits: Tensor | None = None  # [most rows of a graph, V of this rank]

    def __call__(self, work: Work) -> Work:
        """Run the work once, so that its kernels are compiled, and then capture it.

        The largest first: the logits of others are in its buffer.
        """
        # On the stream of the steps: on each other one that products run on, cuBLAS keeps a
        # workspace of 32 MiB.
        result = work()
        output = None if result is None else self._output(result)
        del result  # or the graph's memory would come beside it
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL has threads of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = work()
            if logits is not None and output is not None:
                output.copy_(logits)
        del logits
        graph.replay()  # with its first launch a graph is sent to the device, which takes a while

        def replay() -> Tensor | None:
            graph.replay()
            return output

        return replay

    def _output(self, logits: Tensor) -> Tensor:
        """Return the part of the common buffer that takes logits of this shape."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        assert len(logits) <= len(self._logits), "the largest graph comes first"
        return self._logits[: len(logits)]
