"""kernels.quantized: codes and scales of weights and of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantized import MAX_INPUTS, dequantize, quantize, quantize_rows, quantized_linear
from tests.random_cases import num_cases

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)


@settings(max_examples=num_cases(200), deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_a_code_is_the_nearest_and_the_largest_number_has_code_127(numbers: list[float]) -> None:
    x = torch.tensor([numbers])
    codes, scales = quantize_rows(x)
    largest = float(x.abs().max())
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    if largest < 2.0**-100:
        assert not codes.any() and not scales.any()
        return
    assert int(codes.abs().max()) == 127
    error = (codes.double() * scales.double() - x.double()).abs().max()
    assert error <= 0.5001 * scales.double()


def test_halves_go_to_the_even_code() -> None:
    codes, scales = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]))
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -127]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_makes_its_rows_scale_none(value: float) -> None:
    codes, scales = quantize_rows(torch.tensor([[1.0, value], [1.0, 2.0]]))
    assert codes[0].tolist() == [0, 0]
    assert scales[0].isnan() and scales[1] == 2 / 127


def test_a_weight_has_a_scale_for_each_output_and_is_about_what_it_stands_for() -> None:
    weight = torch.randn(300, 20000, generator=torch.Generator().manual_seed(1))  # several pieces
    weight *= torch.arange(1, 301).unsqueeze(1)
    quantized = quantize(weight, "int8")
    assert torch.equal(quantized.scales, weight.abs().amax(1) / torch.tensor(127.0))
    off = (dequantize(quantized) - weight).abs().amax(1)
    assert bool((off <= 0.5001 * quantized.scales).all())
    pieces = torch.cat([quantize_rows(row.unsqueeze(0))[0] for row in weight])
    assert torch.equal(quantized.codes, pieces)


def test_a_product_of_the_widest_row_is_still_exact_and_a_wider_one_is_refused() -> None:
    x = torch.ones(1, MAX_INPUTS)
    weight = quantize(x, "int8")
    scale = torch.tensor(1.0) / 127
    sums = torch.tensor(127**2 * MAX_INPUTS, dtype=torch.int64)
    assert torch.equal(quantized_linear(x, weight)[0, 0], sums.float() * scale * scale)
    with pytest.raises(ValueError, match=f"133145 inputs is too wide for int8: {MAX_INPUTS}"):
        quantize(torch.ones(1, MAX_INPUTS + 1), "int8")


def test_a_weight_in_int4_has_a_scale_for_each_group_that_leaves_little_error() -> None:
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    weight[7, 32:64] = 0.0
    weight[8, 40], weight[9, 99] = torch.nan, torch.inf
    quantized = quantize(weight, "int4")
    assert quantized.scales.shape == (50, 4) and quantized.scales.dtype == torch.bfloat16
    assert quantized.codes.min() == -8 and quantized.codes.max() == 7
    assert quantized.scales[7, 1] == 0 and not quantized.codes[7, 32:64].any()
    bad = quantized.scales.isnan().nonzero().tolist()
    assert bad == [[8, 1], [9, 3]]
    meant = dequantize(quantized)
    assert meant.shape == weight.shape and meant[8, 32:64].isnan().all()
    sound = torch.arange(50) >= 10
    error = (meant - weight)[sound].norm() / weight[sound].norm()
    groups = torch.nn.functional.pad(weight[sound], (0, 28)).view(40, 4, 32)
    scales = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    plain = (groups / scales).round() * scales
    of_one_scale = (plain - groups).norm() / groups.norm()
    assert error < 0.1 and error < 0.9 * of_one_scale


def test_a_product_in_int4_adds_up_its_groups_in_their_order() -> None:
    x, weight = torch.randn(3, 70), quantize(torch.randn(5, 70), "int4")
    codes, scales = quantize_rows(x)
    total = torch.zeros(3, 5)
    for first in (0, 32, 64):
        here = slice(first, first + 32)
        sums = codes[:, here].long() @ weight.codes[:, here].long().T
        total += sums.float() * weight.scales[:, first // 32].float()
    assert torch.equal(quantized_linear(x, weight), total * scales.unsqueeze(1))
