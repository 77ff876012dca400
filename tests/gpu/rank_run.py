"""One rank's run of a script through the product's own model, bank and GPU runner."""

import torch
from torch import Tensor

from kernels.gpu.backend import GpuKernels
from tests.gpu.place import Place
from tests.gpu.script import Script
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import bank_for
from worker.models.decoder import Model
from worker.pools import PageCounts
from worker.runners.gpu_runner import Capture, CudaCapture, GpuRunner
from worker.runners.warm_up import GraphLadder
from worker.weights.partition import partition

_MAX_POSITIONS = 1024
_GRAPH_ROWS = (1, 4, 8)


def run_script(
    place: Place, script: Script, group: Communicator, *, deterministic: bool, with_graphs: bool
) -> list[Tensor | None]:
    """Return the logits of each step, on the host; None on ranks that have none."""
    runner = make_runner(place, script, group, GpuKernels(deterministic), with_graphs=with_graphs)
    found: list[Tensor | None] = []
    with torch.inference_mode():
        for step in range(len(script.steps)):
            parts = runner.run(script.rows(step)).logits
            logits = None if parts is None else parts.whole()
            found.append(None if logits is None else logits.cpu().clone())
    return found


def make_runner(
    place: Place, script: Script, group: Communicator, kernels: GpuKernels, *, with_graphs: bool
) -> GpuRunner:
    """Return a rank's runner for a script: model, adapters, and pages full of NaN."""
    config, dtype, device = script.model.config, script.model.dtype, place.device
    part = partition(config, group.size, group.rank)
    weights = script.model.weights(part, device)
    model = Model(config, part, weights, group, kernels, _MAX_POSITIONS)
    num_slots = len(script.adapters)
    bank = bank_for(
        kernels,
        part,
        num_layers=config.num_layers,
        num_slots=num_slots,
        dtype=dtype,
        device=device,
    )
    for slot, adapter in enumerate(script.adapters):
        bank.load(slot, adapter.digest, (1.0,), (adapter.cut(part),))
    cache = KVCache(
        num_layers=config.num_layers,
        pages=PageCounts(script.num_pages),
        num_kv_heads=len(part.kv_heads),
        page_size=script.page,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        kernels=kernels,
    )
    for layer in range(config.num_layers):
        for pages in cache.layer(layer):
            pages.fill_(torch.nan)
    runner = GpuRunner(
        model,
        cache,
        bank,
        device,
        max_model_len=_MAX_POSITIONS,
        max_num_batched_tokens=_MAX_POSITIONS,
        max_num_seqs=_GRAPH_ROWS[-1],
        capture=make_capture(place) if with_graphs else None,
        pins_memory=not place.is_dry,
        ladder=GraphLadder(script.page, _MAX_POSITIONS, has_adapters=True, rows=_GRAPH_ROWS),
    )
    if with_graphs:
        runner.warm_up()
    return runner


def make_capture(place: Place) -> Capture:
    """Return what makes graphs; dry, a graph is a call."""
    return (lambda work: work) if place.is_dry else CudaCapture()
