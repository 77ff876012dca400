"""kernels.native coding.c and coded.h: panels in 12 bits for each weight, not one bit lost."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.backend import NativeKernels
from kernels.native.exponent_coding import encode_panels
from kernels.native.huge_pages import HugePages
from kernels.native.library import Library
from kernels.native.packing import pack_panels
from kernels.native.program import ThreadPool
from tests.random_cases import num_cases

SHAPES = [(960, 576), (64, 1536), (33, 70), (40, 33), (31, 48), (70, 10)]


@pytest.fixture
def library(library_of_products: Library) -> Library:
    return library_of_products


@pytest.fixture
def thread_pool(library: Library) -> ThreadPool:
    return ThreadPool(library, 2)


def trained(num_outputs: int, num_inputs: int) -> Tensor:
    """Return numbers whose exponents are spread as those of trained weights."""
    generator = torch.Generator().manual_seed(num_outputs)
    return torch.randn(num_outputs, num_inputs, generator=generator).mul(0.02).bfloat16()


def code(
    weight: Tensor, thread_pool: ThreadPool, bias: Tensor | None = None
) -> LinearWeight | None:
    return encode_panels(pack_panels(weight, bias), thread_pool, HugePages())


def words_of(coded: LinearWeight) -> Tensor:
    """Return the plain panels [panels, steps, 32] of a coded weight, read as coded.h tells."""
    assert coded.code is not None
    num_panels, num_groups, _ = coded.data.shape
    lower, codes = coded.data.long().split([128, 64], dim=2)
    codes = torch.cat([codes & 15, codes >> 4], dim=2)
    upper = coded.code.tables.long().gather(1, codes.view(num_panels, -1)).view(lower.shape)
    halves = (upper << 8 | lower).view(num_panels, num_groups, 2, 4, 2, 4, 2)  # by byte_of_word
    words = halves[..., 0] | halves[..., 1] << 16
    words = words.transpose(3, 4).reshape(num_panels, num_groups * 64)
    for panel, count in enumerate(coded.code.num_outliers.tolist()):
        for place, word in coded.code.outliers[panel, :count].tolist():
            words[panel, place] = word & 0xFFFFFFFF
    num_steps = -(-coded.in_features // 2)
    return words.view(num_panels, -1, 32)[:, :num_steps]


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_product_has_the_bits_that_plain_panels_give(
    library: Library, thread_pool: ThreadPool, num_outputs: int, num_inputs: int, num_threads: int
) -> None:
    weight = trained(num_outputs, num_inputs)
    weight[num_outputs // 2, num_inputs // 3] = 1e-30
    bias = torch.randn(num_outputs).bfloat16()
    plain, coded = pack_panels(weight, bias), code(weight, thread_pool, bias)
    assert coded is not None
    kernels = NativeKernels(ThreadPool(library, num_threads))
    for num_rows in (1, 2, 7, 12, 13, 60, 500):
        x = torch.randn(num_rows, num_inputs).bfloat16()
        assert torch.equal(kernels.linear(x, coded), kernels.linear(x, plain)), num_rows


@pytest.mark.parametrize("num_inputs", [64, 65, 66, 67, 68])
@pytest.mark.parametrize("place", [0, 1, 30, -2, -1])
def test_a_rare_number_may_stand_in_any_group(
    thread_pool: ThreadPool, num_inputs: int, place: int
) -> None:
    weight = trained(96, num_inputs)
    weight[:5, place] = torch.tensor([1e-30, -3e30, 0.0, -0.0, 5e-39]).bfloat16()
    weight[40, place] = 7e20
    coded, plain = code(weight, thread_pool), pack_panels(weight)
    assert coded is not None
    assert torch.equal(words_of(coded), plain.data.long() & 0xFFFFFFFF)
    x = torch.randn(3, num_inputs).bfloat16()
    kernels = NativeKernels(thread_pool)
    assert torch.equal(kernels.linear(x, coded), kernels.linear(x, plain))


@settings(
    max_examples=num_cases(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a library, which nobody changes
)
@given(
    scales=st.lists(st.integers(-60, 60), min_size=1, max_size=12),
    outliers=st.lists(
        st.tuples(st.integers(0, 39), st.integers(0, 127), st.integers(0, 2**15 - 1)), max_size=6
    ),
    seed=st.integers(0, 1000),
)
def test_not_a_bit_of_any_number_is_lost(
    library: Library, scales: list[int], outliers: list[tuple[int, int, int]], seed: int
) -> None:
    thread_pool = ThreadPool(library, 1)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.tensor(scales)[torch.randint(len(scales), (40, 128), generator=generator)]
    weight = torch.ldexp(torch.randn(40, 128, generator=generator), exponents).bfloat16()
    for row, column, bits in outliers:  # also NaN, infinities and subnormals
        weight.view(torch.int16)[row, column] = bits
    coded = code(weight, thread_pool)
    if coded is None:
        return
    assert torch.equal(words_of(coded), pack_panels(weight).data.long() & 0xFFFFFFFF)
    kernels, x = NativeKernels(thread_pool), torch.randn(3, 128, generator=generator).bfloat16()
    y, expected = kernels.linear(x, coded), kernels.linear(x, pack_panels(weight))
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))


def test_trained_weights_take_a_quarter_less_memory(thread_pool: ThreadPool) -> None:
    weight = trained(960, 576)
    coded = code(weight, thread_pool)
    assert coded is not None
    assert 0.75 < coded.num_bytes / pack_panels(weight).num_bytes < 0.76


def test_numbers_without_a_pattern_stay_as_they_are(thread_pool: ThreadPool) -> None:
    bits = torch.randint(-(2**15), 2**15, (64, 256), generator=torch.Generator().manual_seed(1))
    assert code(bits.short().view(torch.bfloat16), thread_pool) is None


def test_one_panel_without_a_pattern_keeps_its_weight_plain(thread_pool: ThreadPool) -> None:
    weight = trained(640, 256)
    bits = torch.randint(-(2**15), 2**15, (32, 256), generator=torch.Generator().manual_seed(1))
    weight[32:64] = bits.short().view(torch.bfloat16)
    assert code(weight, thread_pool) is None


def test_a_weight_that_coding_would_not_shrink_stays_as_it_is(thread_pool: ThreadPool) -> None:
    assert code(trained(32, 2), thread_pool) is None


def test_float32_is_never_coded(thread_pool: ThreadPool) -> None:
    assert code(torch.randn(64, 64), thread_pool) is None


def test_weights_are_coded_alike_by_any_number_of_threads(
    library: Library, thread_pool: ThreadPool
) -> None:
    weight = trained(960, 576)
    one, other = code(weight, thread_pool), code(weight, ThreadPool(library, 1))
    assert one is not None and other is not None and one.code is not None and other.code is not None
    assert torch.equal(one.data, other.data)
    assert torch.equal(one.code.tables, other.code.tables)
    assert torch.equal(one.code.num_outliers, other.code.num_outliers)


def test_kernels_code_a_weight_as_they_prepare_it(thread_pool: ThreadPool) -> None:
    prepared = NativeKernels(thread_pool).prepare_linear(trained(64, 64))
    assert prepared.code is not None
    assert NativeKernels(thread_pool).prepare_linear(torch.randn(64, 64)).code is None
