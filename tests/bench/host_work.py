"""`python -m tests.bench.host_work`: what a rank's host does for a step of decodes on a GPU.

All of it, from the frame of a plan to the reply. The model is a toy whose graphs do nothing, and
so do the sampler's kernels: of launches and copies, which on a CPU would be the work itself, only
torch's own of a few numbers are in it. Prints microseconds of steps and of their parts, medians.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import worker.engine.rank
from deploy.bench.profile import wrapped
from kernels.interface import AnyKernels
from kernels.sampling import RowDraws
from tests.gpu.place import Place
from tests.gpu.script import make_script
from worker.cache.kv_cache import KVCache
from worker.distributed.communicator import SingleRank
from worker.engine.pooling import PromptPooler
from worker.engine.rank import Rank
from worker.engine.sequences import SequenceTable
from worker.grammar import GrammarVocabulary
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
    encode_plan,
)
from worker.runners.device_arrays import DeviceArrays
from worker.runners.gpu_runner import GpuRunner
from worker.runners.warm_up import GraphLadder
from worker.sampling.grammar_masks import GrammarMasks
from worker.sampling.pending_tokens import PendingTokens
from worker.sampling.sampler import Sampler
from worker.weights.partition import partition

_DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("decode the plan", worker.engine.rank, "decode_plan"),
    ("apply it", SequenceTable, "apply"),
    ("build the batch", worker.engine.rank, "build_input_batch"),
    ("send the batch", GpuRunner, "run"),
    ("list the draws", Rank, "_sample_requests"),
    ("sample", Sampler, "sample"),
    ("reply", worker.engine.rank, "build_step_output"),
)


def _kernels(num_seqs: int) -> Any:
    """Return kernels of a GPU of which those do nothing that steps of decodes launch."""
    # With Triton, which `tests.gpu.place` must be asked for first.
    from kernels.gpu.backend import GpuKernels

    values, ids = torch.zeros(num_seqs), torch.zeros(num_seqs, dtype=torch.int64)

    class NoKernels(GpuKernels):
        def argmax(self, _logits: Tensor) -> tuple[Tensor, Tensor]:
            return values, ids

        def sample_rows(self, _logits: Tensor, _draws: RowDraws) -> Tensor:
            return ids

        def clear_pages(self, _pool: Tensor, _pages: Sequence[int] | Tensor) -> None:
            pass

    return NoKernels(deterministic=False)


def _rank(num_seqs: int, context: int, page_size: int, steps: int, grammars: GrammarMasks) -> Rank:
    """Return a rank as far as its device, with a toy in place of a model."""
    place, longest = Place(torch.device("cpu"), is_dry=True), context + steps + 1
    script = make_script(torch.bfloat16, is_toy=True, qk_norm=False)
    config, kernels = script.model.config, _kernels(num_seqs)
    part = partition(config, 1, 0)
    weights = script.model.weights(part, place.device)
    model = Model(config, part, weights, SingleRank(), kernels, longest)
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
    logits = torch.zeros(num_seqs, config.vocab_size)
    runner = GpuRunner(
        model,
        cache,
        bank,
        place.device,
        max_model_len=longest,
        max_num_batched_tokens=num_seqs,
        max_num_seqs=num_seqs,
        capture=lambda _: lambda: logits,
        pins_memory=False,
        ladder=GraphLadder(page_size, longest, has_adapters=False, rows=(num_seqs,)),
    )
    for _ in runner.capture_graphs():
        pass
    # What is there now, rows of nothing, stays there.
    setattr(DeviceArrays, "send", lambda _: None)  # noqa: B010
    config_of_rank = _config(page_size, longest)
    return _assembled(config_of_rank, kernels, cache, runner, grammars, num_seqs)


def _assembled(
    config: RankConfig,
    kernels: AnyKernels,
    cache: KVCache,
    runner: GpuRunner,
    grammars: GrammarMasks,
    num_seqs: int,
) -> Rank:
    """Return a rank of such parts, as `load` and `allocate` put it together."""
    device = torch.device(config.device)
    rank = Rank(config, SingleRank())
    rank._kernels, rank._cache, rank._runner = kernels, cache, runner
    rank._sampler = Sampler(kernels)
    rank._pending = PendingTokens(SingleRank(), kernels, device)
    rank._pooler = PromptPooler(config.page_size, kernels)
    rank._grammars = grammars
    rank._table = SequenceTable(
        page_size=config.page_size,
        pages=PageCounts(num_seqs * -(-config.max_model_len // config.page_size)),
        max_model_len=config.max_model_len,
    )
    return rank


def _no_vocabulary() -> GrammarVocabulary:
    raise AssertionError("nobody asks for a grammar")


def _config(page_size: int, longest: int) -> RankConfig:
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
        # The first token is known, those behind it are not. All grow onto a new page with it.
        token_id, new_pages = (PENDING_TOKEN, False) if step else (0, True)
        chunks = tuple(
            Chunk(
                i,
                each * page_size + step,
                (token_id,),
                (spare + i,) if new_pages else (),
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
    steps: Annotated[int, typer.Option(help="Of which the first does not count.")] = 50,
) -> None:
    """Tell what a step takes the host, and where."""
    assert steps < page_size, "none grows onto a second page"
    grammars = GrammarMasks(_no_vocabulary)
    rank = _rank(num_seqs, context, page_size, steps, grammars)
    frames, digest = [], GENESIS
    for plan in _plans(num_seqs, context, page_size, steps):
        frame, digest = encode_plan(plan, digest)
        frames.append(frame)
    times: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                start = time.perf_counter()
                result = work(*arguments)
                times[name].append(time.perf_counter() - start)
                return result

            return call

        return wrap

    with ExitStack() as stack:
        for name, owner, function in _PARTS:
            stack.enter_context(wrapped(owner, function, timed(name)))
        step = timed("together")(rank.step)
        for number, frame in enumerate(frames):
            if number == 2:
                times.clear()
            step(frame)
    for name, values in times.items():
        typer.echo(f"{name:24}{median(values) * 1e6:8.0f} us")
    grammars.close()


if __name__ == "__main__":
    typer.run(main)
