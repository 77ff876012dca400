"""`python -m tests.bench.host_work`: what a rank's host does for a step of decodes on a GPU.

Everything but the device's own work: a plan is decoded and applied, its rows and draws are laid
out. The model is a toy whose graphs do nothing, so that no kernel runs. Not in it is what it takes
to launch a sampler's kernels and to queue a copy, which on a CPU would be one. Prints microseconds
of each part, medians.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import typer

from tests.gpu.place import Place
from tests.gpu.script import make_script
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import SingleRank
from worker.engine.rank import Rank
from worker.engine.sequences import SequenceTable, build_input_batch, pending_sequences
from worker.lora.adapter_bank import bank_for
from worker.models.decoder import Model
from worker.pools import PageCounts
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Chunk,
    Plan,
    RankConfig,
    SamplingParams,
    SequenceStart,
    decode_plan,
    encode_plan,
)
from worker.runners.device_arrays import DeviceArrays
from worker.runners.gpu_runner import GpuRunner
from worker.runners.warm_up import GraphLadder
from worker.weights.partition import partition

_DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


class _Host:
    """A rank's parts up to its device."""

    def __init__(self, num_seqs: int, context: int, page_size: int, steps: int) -> None:
        # With Triton, which `tests.gpu.place` must be asked for first.
        from kernels.gpu.backend import GpuKernels

        place = Place(torch.device("cpu"), is_dry=True)
        script = make_script(torch.bfloat16, is_toy=True, qk_norm=False)
        config = script.model.config
        part = partition(config, 1, 0)
        kernels, longest = GpuKernels(deterministic=False), context + steps + 1
        model = Model(
            config,
            part,
            script.model.weights(part, place.device),
            SingleRank(),
            kernels,
            longest,
        )
        bank = bank_for(
            kernels,
            part,
            num_layers=config.num_layers,
            num_slots=1,
            dtype=torch.bfloat16,
            device=place.device,
        )
        cache = KVCache(
            num_layers=config.num_layers,
            pages=PageCounts(1),
            num_kv_heads=len(part.kv_heads),
            page_size=page_size,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device=place.device,
            kernels=kernels,
        )
        cache.clear = lambda *_: None  # type: ignore[method-assign]  # that of a GPU is a launch
        self.kernels = kernels
        self._logits = torch.zeros(num_seqs, config.vocab_size)
        self.runner = GpuRunner(
            model,
            cache,
            bank,
            place.device,
            max_model_len=longest,
            max_num_batched_tokens=num_seqs,
            capture=lambda work: lambda: self._logits,
            pins_memory=False,
            ladder=GraphLadder(page_size, longest, has_adapters=False, rows=(num_seqs,)),
        )
        for _ in self.runner.capture_graphs():
            pass
        # What is there now, rows of nothing, stays there.
        setattr(DeviceArrays, "send", lambda _: None)  # noqa: B010
        self.rank = Rank(_rank_config(page_size, longest), SingleRank())
        self.rank._grammars = None
        pages_each = -(-longest // page_size)
        self.table = SequenceTable(
            page_size=page_size,
            pages=PageCounts(num_seqs * pages_each),
            max_model_len=longest,
        )
        self.rank._table = self.table  # instead of loading a model


def _rank_config(page_size: int, longest: int) -> RankConfig:
    return RankConfig(
        model_dir="",
        rank=0,
        tp=1,
        dtype="bfloat16",
        page_size=page_size,
        kv_memory_bytes=0,
        num_slots=0,
        max_model_len=longest,
        num_threads=None,
    )


def _plans(num_seqs: int, context: int, page_size: int, steps: int) -> list[Plan]:
    """Return a plan that starts all sequences, and steps that each have a token of each."""
    each = -(-context // page_size)
    spare = num_seqs * each  # pages behind those that they start with
    starts = tuple(
        SequenceStart(
            *(i, None, _DRAWN, 1, tuple(range(i * each, (i + 1) * each)), each * page_size, ())
        )
        for i in range(num_seqs)
    )
    plans = [Plan(1, (), starts, ())]
    for step in range(steps):
        # All grow onto a new page at first.
        chunks = tuple(
            Chunk(
                i,
                each * page_size + step,
                (PENDING_TOKEN,),
                (spare + i,) if step == 0 else (),
                samples=True,
            )
            for i in range(num_seqs)
        )
        plans.append(Plan(step + 2, (), (), chunks))
    return plans


def main(
    num_seqs: Annotated[int, typer.Option(help="Sequences that decode.")] = 256,
    context: Annotated[int, typer.Option(help="Positions of each.")] = 32_768,
    page_size: Annotated[int, typer.Option(help="Positions of a page.")] = 64,
    steps: Annotated[int, typer.Option(help="That count, and one that does not.")] = 50,
) -> None:
    """Tell what each part of the host's work takes."""
    assert steps < page_size, "none grows onto a second page"
    host = _Host(num_seqs, context, page_size, steps)
    frames, digest = [], GENESIS
    for plan in _plans(num_seqs, context, page_size, steps):
        frame, digest = encode_plan(plan, digest)
        frames.append(frame)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    digest = GENESIS
    pending = torch.zeros(num_seqs, dtype=torch.int64)
    for number, frame in enumerate(frames, 1):
        plan, digest = timed("decode the plan", lambda: decode_plan(frame, digest, number))  # noqa: B023
        timed("apply it", lambda: host.table.apply(plan))  # noqa: B023
        if not plan.chunks:
            times.clear()
            continue
        timed("find pending tokens", lambda: pending_sequences(plan.chunks))  # noqa: B023
        rows = timed("build the batch", lambda: build_input_batch(plan.chunks, host.table))  # noqa: B023
        with torch.inference_mode():
            timed("send the batch", lambda: host.runner.run(rows, pending))  # noqa: B023
        requests = timed("list the draws", lambda: host.rank._sample_requests(plan))  # noqa: B023
        timed(
            "send the draws",
            lambda: host.kernels.send_draws(
                range(num_seqs),
                [request.row_sampling for request in requests],  # noqa: B023
                pending.device,
            ),
        )
    medians = {name: median(values[1:]) * 1e6 for name, values in times.items()}
    for name, value in medians.items():
        typer.echo(f"{name:24}{value:8.0f} us")
    typer.echo(f"{'together':24}{sum(medians.values()):8.0f} us")


if __name__ == "__main__":
    typer.run(main)
