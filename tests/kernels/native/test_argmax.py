"""kernels.native argmax.c: the largest of every row."""

import pytest
import torch
from torch import Tensor

from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import ThreadPool


@pytest.fixture(params=[1, 3])
def kernels(request: pytest.FixtureRequest, library: Library) -> NativeKernels:
    return NativeKernels(ThreadPool(library, request.param))


def check(kernels: NativeKernels, x: Tensor) -> None:
    values, ids = kernels.argmax(x)
    expected = x.max(dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 129, 49152])
def test_it_is_torchs_maximum(kernels: NativeKernels, width: int) -> None:
    check(kernels, torch.randn(19, width, generator=torch.Generator().manual_seed(width)))


def test_of_equals_the_first_wins(kernels: NativeKernels) -> None:
    for first, second in ((0, 5), (3, 19), (15, 16), (31, 32), (1, 99), (98, 99)):
        x = torch.zeros(1, 100)
        x[0, [first, second]] = 2.0
        assert int(kernels.argmax(x)[1]) == first
    assert int(kernels.argmax(torch.zeros(1, 100))[1]) == 0


@pytest.mark.parametrize("place", [0, 16, 77, 99])
def test_nan_is_larger_than_all(kernels: NativeKernels, place: int) -> None:
    x = torch.randn(3, 100)
    x[1, place], x[1, 50] = torch.nan, torch.inf
    values, ids = kernels.argmax(x)
    assert values[1].isnan()
    assert ids[1] == place
    assert not values[[0, 2]].isnan().any()


def test_a_row_of_nothing_but_minus_infinity_says_so(kernels: NativeKernels) -> None:
    values, ids = kernels.argmax(torch.full((2, 40), -torch.inf))
    assert torch.equal(values, torch.full((2,), -torch.inf))
    assert torch.equal(ids, torch.zeros(2, dtype=torch.int64))


def test_no_rows_have_no_largest(kernels: NativeKernels) -> None:
    values, ids = kernels.argmax(torch.empty(0, 5))
    assert values.shape == ids.shape == (0,)
