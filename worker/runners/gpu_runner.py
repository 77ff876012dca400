"""The GPU's model runner: decode steps as CUDA graphs, all others eagerly.

A decode step of a small model takes less time on the device than Python takes to launch its
kernels; a graph launches them all at once. Graphs are captured when first needed, one for each
size; batches are padded to the next size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu.attention.paged_decode import num_splits
from kernels.gpu.attention.paged_prefill import block_rows
from worker.cache.kv_cache import KVCache
from worker.lora.adapter_bank import AdapterBank
from worker.models.decoder import Model
from worker.models.forward_batch import InputBatch
from worker.runners.gpu_batch import BatchSize, GpuBatch, cut_rows, exact_size
from worker.runners.model_output import ModelOutput

Work = Callable[[], Tensor | None]
Capture = Callable[[Work], Work]  # returns what does the same again, into the same tensor

CAPTURE_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))  # rows; no larger graphs
_FIRST_CONTEXT = 512  # positions; each graph takes contexts four times those of the last
_FIRST_RANK = 16


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
        capture: Capture | None,
        pins_memory: bool = True,
    ) -> None:
        """Make a runner that has captured nothing yet.

        Args:
            model: this rank's.
            cache: the KV pages.
            bank: the adapters, with a pointer table.
            device: of all these.
            max_model_len: positions that a sequence may have.
            capture: makes a graph of some work; None: no graphs.
            pins_memory: False only where there is no GPU.
        """
        self._model = model
        self._cache = cache
        self._bank = bank
        self._device = device
        self._max_model_len = max_model_len
        self._capture = capture
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
        size = self._graph_size(rows, exact)
        if size is None:
            batch = GpuBatch(exact, self._bank, self._device, self._pins_memory, self._cache.pools)
            batch.send(rows, cut, self._cache.page_size, pending)
            return self._model.forward(batch.forward_batch(rows), self._cache, rows.hidden_rows)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture_graph(size)
        graph.batch.send(rows, cut, self._cache.page_size, pending)
        logits = graph.replay()
        return (None if logits is None else logits[: len(rows.sample_rows)]), None

    def _graph_size(self, rows: InputBatch, exact: BatchSize) -> BatchSize | None:
        """Return the size of the graph for these rows, None if they run by themselves."""
        only_decodes = exact.decodes == exact.rows == exact.samples
        if self._capture is None or not only_decodes or exact.rows > CAPTURE_SIZES[-1]:
            return None
        assert not rows.hidden_rows, "prompts are pooled, not what follows them"
        if self._bank.embeddings(rows.runs) or self._bank.heads(rows.runs):
            return None
        num_rows = next(size for size in CAPTURE_SIZES if size >= exact.rows)
        context = _FIRST_CONTEXT
        while context < min(self._max_model_len, max(rows.context_lens)):
            context *= 4
        lora_rank = _FIRST_RANK if exact.max_lora_rank else 0
        while lora_rank < exact.max_lora_rank:
            lora_rank *= 2
        return BatchSize(
            rows=num_rows,
            samples=num_rows,
            decodes=num_rows,
            prefills=0,
            blocks=0,
            tiles=num_rows if lora_rank else 0,  # each row may be of another slot
            pages=-(-context // self._cache.page_size),
            max_splits=num_splits(context),
            max_lora_rank=lora_rank,
        )

    def _capture_graph(self, size: BatchSize) -> _Graph:
        """Capture a graph of an empty batch, so that the capture writes no page."""
        assert self._capture is not None, "this runner makes no graphs"
        empty = InputBatch([], [0], [], [], [], (), [])
        batch = GpuBatch(size, self._bank, self._device, self._pins_memory, self._cache.pools)
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
        # [CAPTURE_SIZES[-1], V of this rank], made when first needed
        self._logits: Tensor | None = None

    def __call__(self, work: Work) -> Work:
        """Run the work once, so that its kernels are compiled, and then capture it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = work()
        torch.cuda.current_stream().wait_stream(side)
        output = None if result is None else self._output(result)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: adapters are loaded by others meanwhile, and NCCL has its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = work()
            if logits is not None and output is not None:
                output.copy_(logits)
        del logits

        def replay() -> Tensor | None:
            graph.replay()
            return output

        return replay

    def _output(self, logits: Tensor) -> Tensor:
        """Return the part of the common buffer that takes logits of this shape."""
        if self._logits is None:
            self._logits = logits.new_empty((CAPTURE_SIZES[-1], logits.shape[1]))
        return self._logits[: logits.shape[0]]
