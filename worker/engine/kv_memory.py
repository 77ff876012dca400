"""How much of a GPU's memory is left for KV, found by steps that take as much as any may.

What steps take cannot be told beforehand to the megabyte: libraries have workspaces, and the driver
keeps something of each kernel of each graph. As in vLLM (`gpu_memory_utilization` of its
v1/worker/gpu_worker.py) the largest step is run once. Of graphs the first few are captured, which
are the largest, and all others are taken to be like those behind the first.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol, runtime_checkable

import torch

from worker.cache.kv_cache import KVCache
from worker.engine.loaded_model import LoadedModel
from worker.pools import NO_PAGES, PageCounts
from worker.protocol import SamplingParams
from worker.runners.model_output import ModelOutput
from worker.sampling.sampler import Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling

logger = logging.getLogger("topwork.worker")

# The first has the memory of all; the others tell what each has of its own, which the driver takes
# in pieces of 16 MiB.
_SAMPLED_GRAPHS = 13
# In which the largest step is run; a state is megabytes, and each sequence has one.
_FEW_PAGES = PageCounts(1, window=1, state=8)
_DRAWN = SamplingParams(top_p=0.9, top_k=20)
_MIB = 2**20


def measured_pages(
    loaded: LoadedModel, new_runner: Callable[[KVCache], object], sampler: Sampler
) -> PageCounts:
    """Return how many pages a GPU has room for beside all else; all ranks at the same time.

    Args:
        loaded: the rank's model, which as yet has no pages.
        new_runner: makes its runner over some pages.
        sampler: the rank's.

    Raises:
        ValueError: if there is room for none.
    """
    config, memory = loaded.config, CudaMemory(loaded.device)
    assert config.kv_memory_bytes is None, "it is known how many fit"
    use = _measured_use(loaded, new_runner, sampler, memory)
    memory.free()  # what the steps had is given back
    told = use.describe(config.gpu_memory_utilization)
    logger.info("rank %d: %s", config.rank, told)
    pages = loaded.pages_in(max(0, use.left(config.gpu_memory_utilization)))
    if not loaded.kinds.are_there(pages):
        raise ValueError(
            f"kv_cache_memory: {told}, and not a page fits. Lower adapter_memory, "
            "max_num_batched_tokens or max_num_seqs, or take more ranks"
        )
    return pages


def _measured_use(
    loaded: LoadedModel,
    new_runner: Callable[[KVCache], object],
    sampler: Sampler,
    memory: "DeviceMemory",
) -> "MemoryUse":
    before = memory.allocated()
    cache = loaded.new_cache(_FEW_PAGES, NO_PAGES)
    pages_bytes = memory.allocated() - before
    runner = new_runner(cache)
    assert isinstance(runner, ProfiledRunner), "what a host has is not asked for"
    steps = LargestSteps(runner, sampler)
    return measure_use(memory, steps, pages_bytes, loaded.config.adapter_memory_bytes)


class DeviceMemory(Protocol):
    """What is asked of a device's memory, in bytes."""

    @property
    def total(self) -> int:
        """All that there is."""
        ...

    def free(self) -> int:
        """What no process has, once this one has given back what it does not use."""
        ...

    def allocated(self) -> int:
        """What tensors of this process take."""
        ...

    def start_peak(self) -> None:
        """Forget the most that tensors took before."""
        ...

    def peak(self) -> int:
        """Return the most that tensors took since."""
        ...


@runtime_checkable
class ProfiledRunner(Protocol):
    """The model runner of a GPU."""

    def compile_kernels(self) -> None:
        """Launch every kernel in every way."""
        ...

    def run_largest(self) -> ModelOutput:
        """Run batches of which none takes more memory, the last with a sample of each sequence."""
        ...

    def capture_graphs(self) -> Iterable[int]:
        """Capture one graph after the other, the largest first; yield how many are to come."""
        ...


class ProfiledSteps(Protocol):
    """The steps of a rank that has a handful of pages."""

    def run_largest(self) -> None:
        """Run steps of which none may take more, and draw their tokens."""
        ...

    def capture_graphs(self) -> Iterable[int]:
        """Capture one graph after the other, the largest first; yield how many are to come."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a GPU's memory is used for beside KV, in bytes."""

    total: int
    held: int  # by weights and libraries, and by other processes
    steps: int  # by the largest step, while it runs
    graphs: int
    adapters: int  # in slots, once these are full

    def left(self, utilization: float) -> int:
        """Return what is left for KV if such a share of the memory may be in use."""
        used = self.held + self.steps + self.graphs + self.adapters
        return int(self.total * utilization) - used

    def describe(self, utilization: float) -> str:
        """Return the sum in words."""
        return (
            f"of a GPU's {_mib(self.total)} {utilization:.0%} may be in use "
            f"(gpu_memory_utilization); weights, libraries and other processes have "
            f"{_mib(self.held)}, the largest step takes {_mib(self.steps)}, graphs take "
            f"{_mib(self.graphs)} and adapters in slots {_mib(self.adapters)}: "
            f"{_mib(self.left(utilization))} are left for KV"
        )


def measure_use(
    memory: DeviceMemory, steps: ProfiledSteps, pages_bytes: int, adapters_bytes: int
) -> MemoryUse:
    """Return what is used beside KV, by running the steps.

    Args:
        memory: of the device.
        steps: to run.
        pages_bytes: that their handful of pages takes.
        adapters_bytes: that adapters in slots may come to take.
    """
    memory.start_peak()
    before = memory.allocated()
    steps.run_largest()
    peak = memory.peak() - before
    held = memory.total - memory.free() - pages_bytes
    return MemoryUse(memory.total, held, peak, _graph_bytes(memory, steps), adapters_bytes)


def _graph_bytes(memory: DeviceMemory, steps: ProfiledSteps) -> int:
    """Return what all graphs take: the first has the memory of all, the others have their own."""
    free, to_come = [memory.free()], [0]
    for num_left in islice(steps.capture_graphs(), _SAMPLED_GRAPHS):
        free.append(memory.free())
        to_come.append(num_left)
    taken = [before - after for before, after in pairwise(free)]
    others = taken[1:]
    each = -(-sum(others) // len(others)) if others else 0
    return sum(taken) + to_come[-1] * each


class LargestSteps:
    """See `ProfiledSteps`; all ranks run them at the same time."""

    def __init__(self, runner: ProfiledRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def run_largest(self) -> None:
        """See `ProfiledSteps`."""
        self._runner.compile_kernels()  # or what they take would be counted for each graph
        logits = self._runner.run_largest().logits
        if logits is None:  # a model that classifies
            return
        with torch.inference_mode():
            drawn = SequenceSampling.of(_DRAWN)
            requests = [SampleRequest(row, drawn, 1, 1, []) for row in range(len(logits.part))]
            sampled = self._sampler.sample(logits, requests)
            if sampled is not None:
                sampled.readback.read()

    def capture_graphs(self) -> Iterable[int]:
        """See `ProfiledSteps`."""
        return self._runner.capture_graphs()


class CudaMemory:
    """See `DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        """See `DeviceMemory`."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocated(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `DeviceMemory`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
