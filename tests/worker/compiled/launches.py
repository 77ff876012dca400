"""What whole steps would have a GPU compile, on a machine without one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.compiler import set_gpu
from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import InputBatch

Ways = dict[str, set[Any]]  # of each kernel: how it was compiled


@contextmanager
def compiled_kernels() -> Iterator[Ways]:
    """Compile what is launched inside, as a Hopper would, and give the ways of each kernel.

    Nothing is computed. Integers that a kernel would have written are 0, so that what torch does
    with them, such as choosing rows, is right.
    """
    found: Ways = {}
    forgotten: set[int] = set()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if id(self) not in forgotten:
            self.device_caches.clear()
            forgotten.add(id(self))
        original(self, *arguments, grid=(1,), warmup=True, **options)
        found.setdefault(self.fn.__name__, set()).update(self.device_caches[0][0])
        for argument in arguments:
            if isinstance(argument, Tensor) and not argument.is_floating_point():
                argument.zero_()

    original = JITFunction.run
    set_gpu(90)
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = original


def copied(found: Ways) -> Ways:
    """Return the ways until now."""
    return {name: set(ways) for name, ways in found.items()}


def later(found: Ways, known: Ways) -> dict[str, int]:
    """Return how many ways each kernel has besides the known ones, if it has any."""
    numbers = {name: len(ways - known.get(name, set())) for name, ways in found.items()}
    return {name: number for name, number in numbers.items() if number}


def some_batch(
    chance: random.Random, counts: list[int], num_pages: int, page: int, vocabulary: int
) -> InputBatch:
    """Return sequences with so many rows each, of the base model and of an adapter in slot 0.

    Those of one row are decodes, where they have a context; each has a state page of its own.
    """
    lengths = [min(num_pages * page, n + chance.choice((0, 1, 127, 300))) for n in counts]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    first_adapted = chance.randint(0, len(counts))
    runs = (SlotRows(0, starts[first_adapted], starts[-1]),)
    tables = [chance.sample(range(num_pages), num_pages) for _ in counts]
    return InputBatch(
        token_ids=[chance.randrange(vocabulary) for _ in range(starts[-1])],
        query_starts=starts,
        context_lens=lengths,
        page_tables=tables,
        decodes=[n == 1 and length > 1 for n, length in zip(counts, lengths, strict=True)],
        runs=runs if first_adapted < len(counts) else (),
        sample_rows=[stop - 1 for stop in starts[1:] if chance.random() < 0.7] or [starts[-1] - 1],
        window_tables=tables,
        state_pages=range(len(counts)),
    )
