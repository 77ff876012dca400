"""The batch-invariant product on the device: near float64, and rows and shards to the bit.

Shapes: T rows, K inputs, N outputs.
"""

from collections.abc import Iterator

import torch

from kernels import reference
from kernels.gpu.batch_invariant.linear import batch_invariant_linear
from tests.gpu.checks import DTYPES, GATES, expect_near, expect_same
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding

_SHAPES = {  # (N, K)
    "o of Llama-3.1-8B": (4096, 4096),
    "down of SmolLM2": (576, 1536),
    "odd widths": (200, 96),
}


def cases(place: Place) -> Iterator[Case]:
    for name, (outputs, inputs) in _SHAPES.items():
        for dtype in DTYPES:
            if place.is_dry and (name, dtype) != ("odd widths", "bfloat16"):
                continue
            args = (place, outputs, inputs, DTYPES[dtype])
            yield f"batch-invariant product {dtype} {name}", lambda args=args: near(*args)


def near(place: Place, outputs: int, inputs: int, dtype: torch.dtype) -> Finding:
    count = place.pick(1000, 20)
    x = place.randn(count, inputs, dtype=dtype)
    weight = place.randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = place.randn(outputs, dtype=dtype)
    y = batch_invariant_linear(x, weight, bias)
    wanted = reference.linear(x.double(), weight.double(), bias.double())
    error = expect_near(y, wanted, GATES[dtype])
    for size in place.pick((1, 2, 15, 16, 17, 64, 65, 128, 300), (1, 17)):
        for first in place.pick((0, 7, 600), (3,)):
            rows = slice(first, first + size)
            expect_same(
                batch_invariant_linear(x[rows], weight, bias), y[rows], f"{size} rows from {first}"
            )
    _check_shards(place, outputs, inputs, dtype)
    return {"error": error, "gate": GATES[dtype], "note": "shards of K add up to the bit"}


def _check_shards(place: Place, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Two ranks with half of K each, or four with a quarter, sum to what one rank computes."""
    num_parts = 4 if inputs % 64 == 0 else 2
    x = place.randn(20, inputs, dtype=dtype)
    weight = place.randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    float32 = torch.float32
    whole = batch_invariant_linear(x, weight, None, num_parts, float32)
    num_ranks = num_parts
    while num_ranks > 1:
        width = inputs // num_ranks
        sums = [
            batch_invariant_linear(
                x[:, i : i + width].contiguous(),
                weight[:, i : i + width].contiguous(),
                None,
                num_parts // num_ranks,
                float32,
            )
            for i in range(0, inputs, width)
        ]
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        expect_same(sums[0], whole, f"{num_ranks} ranks")
        num_ranks //= 2
