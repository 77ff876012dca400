"""A rank's largest steps on torch's meta device: no memory, no numbers, but every tensor counted.

Launches do nothing, and weights are tensors without a checkpoint; all else is what a GPU's rank
runs.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.jit import JITFunction

from kernels.gpu.backend import GpuKernels
from worker.cache.kv_cache import KVCache
from worker.cache.page_budget import page_kinds
from worker.distributed.communicator import Communicator, SingleRank
from worker.distributed.parallel import TorchGroup
from worker.lora.adapter_bank import bank_for
from worker.model_config import ModelConfig
from worker.models.decoder import Model
from worker.pools import PageCounts
from worker.protocol import SamplingParams
from worker.runners.capture_sizes import capture_sizes
from worker.runners.gpu_runner import GpuRunner
from worker.runners.warm_up import GraphLadder
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling
from worker.spans import Span, even_spans
from worker.weights import loader
from worker.weights.partition import partition

META = torch.device("meta")
PAGE_SIZE = 64


class CountedTensors(TorchDispatchMode):
    """Counts the bytes of tensors that are made on the meta device while they live.

    What was there before does not count. Bytes without a type are a batch's arrays of indices, and
    counted by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.most_indices = 0
        self._live = self._live_indices = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what is asked, and count what comes of it."""
        for one in tree_flatten((args, kwargs))[0]:
            if isinstance(one, Tensor):
                self._know(one.untyped_storage(), 0, 0)
        made = func(*args, **(kwargs or {}))
        for one in tree_flatten(made)[0]:
            if isinstance(one, Tensor) and one.device == META:
                storage, is_indices = one.untyped_storage(), one.dtype == torch.uint8
                size = storage.nbytes()
                self._know(storage, 0 if is_indices else size, size if is_indices else 0)
        return made

    def _know(self, storage: torch.UntypedStorage, size: int, indices: int) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._live += size
        self._live_indices += indices
        self.peak = max(self.peak, self._live)
        self.most_indices = max(self.most_indices, self._live_indices)
        weakref.finalize(storage, self._forget, storage._cdata, size, indices)

    def _forget(self, key: int, size: int, indices: int) -> None:
        self._known.remove(key)
        self._live -= size
        self._live_indices -= indices


class _MetaCheckpoint:
    """A checkpoint of tensors that nobody has written."""

    names: frozenset[str] = frozenset()

    def __enter__(self) -> "_MetaCheckpoint":
        return self

    def __exit__(self, *raised: object) -> None:
        """Close nothing."""

    def read(self, name: str, shape: Sequence[int], *spans: Span, dtypes: object = None) -> Tensor:
        """Return what would be read."""
        sizes = [len(span) for span in spans] + list(shape[len(spans) :])
        return torch.empty(sizes, dtype=torch.bfloat16, device=META)


class _Done:
    def wait(self) -> None:
        """Do nothing."""


class _MetaBackend:
    """What torch.distributed does for ranks of which only this one is there: nothing."""

    def allreduce(self, tensors: list[Tensor]) -> _Done:
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> _Done:
        return _Done()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object) -> _Done:
        return _Done()

    def abort(self) -> None:
        """Do nothing."""


def _group(rank: int, size: int) -> Communicator:
    if size == 1:
        return SingleRank()
    module = "worker.distributed.parallel"
    with patch(f"{module}._store"), patch(f"{module}._gloo", return_value=_MetaBackend()):
        return TorchGroup("tcp://127.0.0.1:1", rank, size, "cpu", 1.0)


@dataclass(frozen=True)
class Limits:
    """How large steps are."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_slots: int = 0
    max_lora_rank: int = 16
    deterministic: bool = False


class MetaRank:
    """One rank of a model, with pages and slots, whose largest steps can be run."""

    def __init__(
        self,
        config: ModelConfig,
        tp: int,
        rank: int,
        dtype: torch.dtype,
        limits: Limits,
    ) -> None:
        self.part = partition(config, tp, rank)
        self._config = config
        self._group = _group(rank, tp)
        self._limits = limits
        kernels = GpuKernels(limits.deterministic, tp)
        checkpoint = _MetaCheckpoint()
        with (
            patch.object(loader, "check_checkpoint"),
            patch.object(loader, "open_checkpoint", return_value=checkpoint),
        ):
            prepares = kernels.prepare_linear, kernels.prepare_experts
            weights = loader.load_weights(Path(), config, self.part, dtype, META, *prepares)
        model = Model(config, self.part, weights, self._group, kernels, limits.max_model_len)
        kinds = page_kinds(config, PAGE_SIZE, limits.max_model_len)
        states = limits.max_num_seqs if kinds.state_layers else 0
        cache = KVCache(
            num_layers=config.num_layers,
            pages=PageCounts(1, window=bool(kinds.window_layers), state=states),
            num_kv_heads=len(self.part.kv_heads),
            page_size=PAGE_SIZE,
            head_dim=config.head_dim,
            dtype=dtype,
            device=META,
            kernels=kernels,
            window_layers=kinds.window_layers,
            state_layers=kinds.state_layers,
            state_shapes=() if self.part.mixer is None else self.part.mixer.state_shapes,
        )
        bank = bank_for(
            kernels,
            self.part,
            num_layers=config.num_layers,
            num_slots=limits.num_slots,
            dtype=dtype,
            device=META,
        )
        self._ladder = GraphLadder(
            PAGE_SIZE,
            limits.max_model_len,
            has_adapters=limits.num_slots > 0,
            rows=capture_sizes(limits.max_num_seqs),
        )
        self._runner = GpuRunner(
            model,
            cache,
            bank,
            META,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_lora_rank=limits.max_lora_rank,
            capture=None,
            pins_memory=False,
            ladder=self._ladder,
        )

    def run_largest(self) -> CountedTensors:
        """Run the steps of which none takes more."""
        with _launches_that_do_nothing(), CountedTensors() as counted:
            self._runner.run_largest()
        return counted

    def make_graph_batches(self) -> CountedTensors:
        """Make the arrays of all graphs."""
        with CountedTensors() as counted:
            batches = [self._runner._new_batch(size) for size in self._ladder.all_sizes()]
        assert batches, "there is a graph of some size"
        return counted

    def draw(self) -> CountedTensors:
        """Draw from so many rows, all in the most expensive way."""
        vocab, kernels = self._config.vocab_size, _WithoutReadback(self._limits.deterministic)
        widths = [len(span) for span in even_spans(vocab, self.part.tp)]
        drawn = SequenceSampling.of(SamplingParams(top_p=0.9, top_k=20))
        requests = [SampleRequest(row, drawn, 1, 1, []) for row in range(self._limits.max_num_seqs)]
        with _launches_that_do_nothing(), CountedTensors() as counted:
            part = torch.empty(len(requests), len(self.part.vocab), device=META)
            logits = RowLogits(part, widths, self._group, kernels)
            Sampler(kernels).sample(logits, requests)
        return counted


class _WithoutReadback(GpuKernels):
    """Nothing can be read back of tensors without numbers."""

    def start_readback(self, tensors: Sequence[Tensor], device: torch.device) -> Any:
        """Do nothing."""


@contextmanager
def _launches_that_do_nothing() -> Iterator[None]:
    with patch.object(JITFunction, "run", lambda *arguments, **options: None):
        yield
