"""The steady product: right, and with the same bits for any number of rows and of ranks."""

from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.batch_invariant.bulk import bulk_product, fits_bulk_copies
from kernels.gpu.batch_invariant.linear import batch_invariant_linear, num_tree_parts
from kernels.gpu.batch_invariant.split import SPLIT_ROWS, split_product
from kernels.gpu.batch_invariant.tiles import tiled_product

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GATES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
LARGE = 257  # rows; one fewer take the small tiles


@pytest.fixture(autouse=True)
def _results_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, nan, **how))


def make(
    num_rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, rows of a wider tensor of NaN, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((num_rows, inputs + 16), float("nan"))[:, :inputs]
    x.copy_(torch.randn(num_rows, inputs, generator=generator))
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    x = torch.cat([x, torch.full((num_rows, 16), float("nan"))], dim=1).to(dtype)[:, :inputs]
    return x, weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def error(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    wanted = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "inputs", "outputs", "num_parts"),
    [
        (1, 64, 1, 1),
        (3, 80, 33, 1),  # tails of K and of N
        (65, 144, 40, 1),
        (2, 77, 24, 1),
        (2, 576, 192, 2),
        (5, 192, 40, 4),
        (2, 128, 24, 8),
        (LARGE, 96, 40, 2),
        (LARGE + 140, 80, 130, 1),  # a second block of outputs, a fourth of rows
    ],
)
def test_the_product_is_right(
    dtype: torch.dtype, num_rows: int, inputs: int, outputs: int, num_parts: int
) -> None:
    x, weight, bias = make(num_rows, inputs, outputs, dtype)
    out = batch_invariant_linear(x, weight, bias, num_parts)
    assert out.shape == (num_rows, outputs) and out.dtype == dtype
    assert error(out, x, weight, bias) <= GATES[dtype]
    for row in (0, num_rows - 1):
        assert error(out[row], x[row], weight, bias) <= 2 * GATES[dtype]


def test_ranks_take_whole_branches_of_the_tree() -> None:
    assert [num_tree_parts(inputs) for inputs in (4096, 14336, 576, 96, 72)] == [8, 8, 4, 2, 1]


def test_many_blocks_of_rows_are_each_made_once() -> None:
    """More than one group of eight, the last one not full."""
    x, weight, _ = make(128 * 9 + 5, 16, 130, torch.float16)
    out = batch_invariant_linear(x, weight, None)
    assert error(out, x, weight, None) <= GATES[torch.float16]


@pytest.mark.usefixtures("dots_are_chains")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "num_parts"), [(320, 1), (288, 2), (192, 4)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    dtype: torch.dtype, inputs: int, num_parts: int
) -> None:
    """For few rows and for many, at any place: tiles of 64 and of 128 rows agree."""
    x, weight, bias = make(LARGE + 20, inputs, 40, dtype)
    alone = batch_invariant_linear(x[:1], weight, bias, num_parts, torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    order = torch.cat([order[order != 0][:40], order[order == 0], order[order != 0][40:]])
    for rows in (x[:2], x[:17], x[:64], x, x[order][:50], x[order]):
        place = int((rows == x[0]).all(dim=1).nonzero())
        out = batch_invariant_linear(rows, weight, bias, num_parts, torch.float32)
        assert torch.equal(out[place], alone[0])


@pytest.mark.usefixtures("dots_are_chains")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("inputs", "num_parts"), [(128, 1), (128, 2), (256, 4), (512, 8), (1024, 8)]
)
def test_tiles_copied_in_bulk_make_the_bits_of_others(
    inputs: int, num_parts: int, has_bias: bool
) -> None:
    """More blocks than programs, the last of rows and of outputs not full."""
    x, weight, bias = make(LARGE + 20, inputs, 200, torch.bfloat16)
    assert fits_bulk_copies(x, weight, num_parts)
    wanted, out = (torch.empty(len(x), 200, dtype=torch.float32) for _ in range(2))
    tiled_product(x, weight, bias if has_bias else None, wanted, num_parts)
    bulk_product(x, weight, bias if has_bias else None, out, num_parts)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(("inputs", "num_parts"), [(96, 1), (192, 2), (320, 4)])
def test_parts_that_are_no_whole_tiles_are_not_copied_in_bulk(inputs: int, num_parts: int) -> None:
    x, weight, _ = make(2, inputs, 16, torch.bfloat16)
    assert not fits_bulk_copies(x, weight, num_parts)


def test_rows_that_begin_anywhere_are_not_copied_in_bulk() -> None:
    x, weight, _ = make(2, 128, 16, torch.bfloat16)
    wide = torch.zeros(2, 132, dtype=torch.bfloat16)
    assert fits_bulk_copies(x, weight, 1)
    assert not fits_bulk_copies(wide[:, :128], weight, 1)
    assert not fits_bulk_copies(torch.zeros(2, 144, dtype=torch.bfloat16)[:, 4:132], weight, 1)
    assert not fits_bulk_copies(x.float(), weight.float(), 1)


@pytest.mark.usefixtures("dots_are_chains")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "num_parts"), [(96, 2), (448, 4), (256, 8)])
@pytest.mark.parametrize("num_rows", [1, 33, SPLIT_ROWS])
def test_parts_beside_each_other_make_the_bits_of_one_after_the_other(
    dtype: torch.dtype, inputs: int, num_parts: int, num_rows: int
) -> None:
    x, weight, bias = make(num_rows, inputs, 140, dtype)
    wanted, out = (torch.empty(num_rows, 140, dtype=dtype) for _ in range(2))
    tiled_product(x, weight, bias, wanted, num_parts)
    split_product(x, weight, bias, out, num_parts)
    assert torch.equal(out, wanted)


@pytest.mark.usefixtures("dots_are_chains")
def test_a_wide_output_has_the_bits_of_a_narrow_one() -> None:
    x, weight, _ = make(3, 128, 8192, torch.bfloat16)
    wide = batch_invariant_linear(x, weight, None, out_dtype=torch.float32)
    for own in (slice(None, 70), slice(-70, None)):
        narrow = batch_invariant_linear(x, weight[own].contiguous(), None, out_dtype=torch.float32)
        assert torch.equal(wide[:, own], narrow)


def add_as_a_tree(results: Sequence[Tensor]) -> Tensor:
    while len(results) > 1:
        results = [low + high for low, high in zip(results[::2], results[1::2], strict=True)]
    return results[0]


@pytest.mark.usefixtures("dots_are_chains")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_parts", "num_ranks"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("num_rows", [3, LARGE])
def test_ranks_that_hold_parts_of_k_add_up_to_the_bits_of_one(
    dtype: torch.dtype, num_parts: int, num_ranks: int, num_rows: int
) -> None:
    if num_rows == LARGE and (num_parts != 4 or dtype == torch.float16):
        num_rows = 65  # the rest of the cases, at less than the price
    x, weight, _ = make(num_rows, 256, 24, dtype)
    one = batch_invariant_linear(x, weight, None, num_parts, torch.float32)
    shards = [
        batch_invariant_linear(
            one_x, one_weight.contiguous(), None, num_parts // num_ranks, torch.float32
        )
        for one_x, one_weight in zip(
            x.chunk(num_ranks, dim=1), weight.chunk(num_ranks, dim=1), strict=True
        )
    ]
    assert torch.equal(add_as_a_tree(shards), one)
    assert error(one, x, weight, None) <= 1e-5


def test_parts_are_added_as_a_tree_and_not_in_a_row() -> None:
    """Parts 1e8, 1, -1e8, 1 give 0 in pairs, in float32, and 1 one after the other."""
    x, weight = torch.ones(1, 64), torch.zeros(16, 64)
    weight[:, 0], weight[:, 16], weight[:, 32], weight[:, 48] = 1e8, 1.0, -1e8, 1.0
    assert (batch_invariant_linear(x, weight, None, 4) == 0).all()
    in_a_row = reduce(lambda total, part: total + part, [weight[0, at] for at in (0, 16, 32, 48)])
    assert in_a_row == 1


def test_the_bias_is_added_last_and_the_sum_rounded_once() -> None:
    x, weight, _ = make(9, 64, 40, torch.bfloat16)
    exact = batch_invariant_linear(x, weight, None, out_dtype=torch.float32)
    bias = torch.linspace(-3, 3, 40, dtype=torch.float32)
    out = batch_invariant_linear(x, weight, bias)
    assert torch.equal(out, (exact + bias).bfloat16())
    assert not torch.equal(out, exact.bfloat16() + bias.bfloat16())


def test_no_rows_give_no_rows() -> None:
    x, weight, bias = make(0, 32, 16, torch.bfloat16)
    assert batch_invariant_linear(x, weight, bias).shape == (0, 16)


@pytest.mark.parametrize(
    ("inputs", "num_parts", "told"),
    [
        (96, 3, "power of two"),
        (96, 4, "multiple of 16"),
        (72, 2, "multiple of 16"),
        (96, 0, "two"),
        (256, 16, "8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(inputs: int, num_parts: int, told: str) -> None:
    x, weight, _ = make(2, inputs, 16, torch.float32)
    with pytest.raises(AssertionError, match=told):
        batch_invariant_linear(x, weight, None, num_parts)
