"""kernels.linear: right in float64's eyes, and each row the same bits in any company."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.linear import LinearWeight, can_pack, linear, prepare_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (64, 577), (3, 100), (1, 1536), (7, 33)]
ROW_COUNTS = [1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 33, 64, 65, 129, 300]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def plain(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Return the form taken where oneDNN cannot pack."""
    out_features, in_features = weight.shape
    return LinearWeight(weight, bias, in_features, out_features, weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_layer_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    x = torch.randn(9, shape[1], generator=generator).to(dtype)
    expected = reference.linear(x.double(), weight.double(), bias.double())
    for prepared in (prepare_linear(weight, bias), plain(weight, bias)):
        actual = linear(x, prepared)
        assert actual.dtype == dtype
        assert error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prepare", [prepare_linear, plain])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    prepare: type, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = prepare(torch.randn(shape, generator=generator).to(dtype))
    x = torch.randn(300, shape[1], generator=generator).to(dtype)
    whole = linear(x, weight)
    for num_rows in ROW_COUNTS:
        for first in (0, 300 - num_rows):
            part = linear(x[first : first + num_rows], weight)
            assert torch.equal(part, whole[first : first + num_rows]), (num_rows, first)


def test_no_rows_give_no_rows() -> None:
    assert linear(torch.empty(0, 8), prepare_linear(torch.randn(5, 8))).shape == (0, 5)


def test_a_neighbour_full_of_nan_changes_nothing() -> None:
    weight = prepare_linear(torch.randn(64, 64))
    x = torch.randn(3, 64)
    alone = linear(x[:1], weight)
    x[1:] = torch.nan
    assert torch.equal(linear(x, weight)[:1], alone)


def test_bytes_count_the_weight_and_the_bias() -> None:
    weight = torch.randn(6, 10).double()
    assert not can_pack(weight)
    assert prepare_linear(weight).num_bytes == 480
    assert prepare_linear(weight, torch.randn(6).double()).num_bytes == 528


def test_bytes_count_what_the_blocked_layout_adds() -> None:
    if not can_pack(torch.randn(1, 1)):
        pytest.skip("oneDNN cannot pack here")
    whole, odd = (prepare_linear(torch.randn(n, 576)) for n in (512, 513))
    assert whole.num_bytes == 512 * 576 * 4
    assert odd.num_bytes > 513 * 576 * 4
    assert prepare_linear(torch.randn(512, 576), torch.randn(512)).num_bytes == 512 * 577 * 4


def test_the_packed_weight_does_not_keep_the_callers_copy() -> None:
    weight = torch.randn(64, 64)
    x = torch.randn(4, 64)
    if not can_pack(weight):
        pytest.skip("oneDNN cannot pack here")
    prepared = prepare_linear(weight)
    before = linear(x, prepared)
    weight.zero_()
    assert torch.equal(linear(x, prepared), before)


MEMORY_CODE = """
import torch
from kernels.linear import linear, prepare_linear
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
weights = [prepare_linear(torch.randn(n, 576).bfloat16()) for n in (960, 576, 1536)]
def use(rows):
    for weight in weights:
        linear(torch.randn(rows, 576).bfloat16(), weight)
for rows in (512, 33, 64, 128, 256, 32, 16, 8, 4, 2):
    use(rows)
before = resident()
for rows in range(1, 400):
    use(rows)
print(resident() - before)
"""


@pytest.mark.slow  # half a minute of a core
def test_memory_does_not_grow_with_the_numbers_of_rows_seen() -> None:
    # A server sees every number of rows; the matrix library must not keep something for each.
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_CODE], capture_output=True, text=True, cwd=root, check=True
    )
    assert int(done.stdout) < 16 * 2**20  # without blocks: several hundred MB
