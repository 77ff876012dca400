"""kernels.native linear.c: a linear layer on packed panels."""

import pytest
import torch
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.packing import pack_panels
from kernels.native.program import ThreadPool

DTYPES = [torch.float32, torch.bfloat16]
# The sums are float32: what is left of a product of bfloat16 is their rounding alone.
TOLERANCE = 2e-6
SHAPES = [(576, 960), (1536, 576), (64, 32), (48, 31), (7, 5), (33, 70), (1, 1), (100, 33)]


@pytest.fixture
def library(library_of_products: Library) -> Library:
    return library_of_products


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_exact_but_for_float32_sums(
    library: Library, num_inputs: int, num_outputs: int, dtype: torch.dtype, *, has_bias: bool
) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weight = randn(num_outputs, num_inputs, seed=1, dtype=dtype)
    bias = randn(num_outputs, seed=2, dtype=dtype) if has_bias else None
    packed = kernels.prepare_linear(weight.clone(), bias)
    for num_rows in (1, 2, 11, 12, 13, 16, 17, 30, 33, 100):
        x = randn(num_rows, num_inputs, seed=100 + num_rows, dtype=dtype)
        y = kernels.linear(x, packed)
        assert y.dtype == torch.float32
        assert error(y, exact(x, weight, bias)) < TOLERANCE


@pytest.mark.parametrize(("num_outputs", "apart"), [(96, 96), (256, 272), (3072, 3088)])
def test_rows_of_whole_kilobytes_lie_a_line_further_apart(
    library: Library, num_outputs: int, apart: int
) -> None:
    kernels = NativeKernels(ThreadPool(library, 2))
    weight, x = randn(num_outputs, 64, seed=1), randn(40, 64, seed=2)
    packed = kernels.prepare_linear(weight.clone())
    y = kernels.linear(x, packed)
    assert y.shape == (40, num_outputs) and y.stride() == (apart, 1)
    assert error(y, exact(x, weight, None)) < TOLERANCE
    part = kernels.partial_linear(x, packed)
    assert part.is_contiguous() and torch.equal(part, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_rows(library: Library, dtype: torch.dtype) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = kernels.prepare_linear(randn(5, 8, seed=1, dtype=dtype))
    assert kernels.linear(torch.empty(0, 8, dtype=dtype), packed).shape == (0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(1536, 200), (33, 70), (576, 31)])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    library: Library, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    packed = pack_panels(randn(num_outputs, num_inputs, seed=1, dtype=dtype))
    x = randn(500, num_inputs, seed=2, dtype=dtype)  # more than one block of rows
    results = []
    for num_threads in (1, 2, 3):
        kernels = NativeKernels(ThreadPool(library, num_threads))
        results.append(kernels.linear(x, packed))
        for first, size in ((0, 1), (7, 2), (100, 17), (499, 1), (3, 401)):
            part = kernels.linear(x[first : first + size], packed)
            assert torch.equal(part, results[0][first : first + size])
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", [32, 33])
def test_what_lies_beside_a_rows_inputs_is_no_number_to_it(
    library: Library, num_inputs: int, dtype: torch.dtype
) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = pack_panels(randn(40, num_inputs, seed=1, dtype=dtype))
    wide = torch.full((3, num_inputs + 5), torch.nan, dtype=dtype)
    wide[:, :num_inputs] = randn(3, num_inputs, seed=2, dtype=dtype)
    x = wide[:, :num_inputs]
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x.contiguous(), packed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_nan_stays_in_its_row(library: Library, dtype: torch.dtype) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = pack_panels(randn(40, 64, seed=1, dtype=dtype))
    x = randn(5, 64, seed=2, dtype=dtype)
    clean = kernels.linear(x, packed)
    x[2, 3] = torch.nan
    y = kernels.linear(x, packed)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])


def test_a_packed_weight_says_how_much_memory_it_takes() -> None:
    assert pack_panels(torch.zeros(33, 7)).num_bytes == 64 * 7 * 4
    packed = pack_panels(torch.zeros(33, 7).bfloat16(), torch.zeros(33).bfloat16())
    assert packed.num_bytes == 64 * 8 * 2 + 33 * 4


def test_rows_of_another_type_than_the_weights_are_refused(library: Library) -> None:
    kernels = NativeKernels(ThreadPool(library, 1))
    packed = pack_panels(torch.zeros(4, 4))
    with pytest.raises(AssertionError, match=r"torch.bfloat16 rows for torch.float32 weights"):
        kernels.linear(torch.zeros(1, 4).bfloat16(), packed)


def test_torch_refuses_panels() -> None:
    from kernels.linear import linear

    packed: LinearWeight = pack_panels(torch.zeros(4, 4))
    with pytest.raises(AssertionError, match="panels are for C"):
        linear(torch.zeros(1, 4), packed)
