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
    quantized = quantize(weight)
    assert torch.equal(quantized.scales, weight.abs().amax(1) / torch.tensor(127.0))
    off = (dequantize(quantized) - weight).abs().amax(1)
    assert bool((off <= 0.5001 * quantized.scales).all())
    pieces = torch.cat([quantize_rows(row.unsqueeze(0))[0] for row in weight])
    assert torch.equal(quantized.codes, pieces)


def test_a_product_of_the_widest_row_is_still_exact_and_a_wider_one_is_refused() -> None:
    x = torch.ones(1, MAX_INPUTS)
    weight = quantize(x)
    scale = torch.tensor(1.0) / 127
    sums = torch.tensor(127**2 * MAX_INPUTS, dtype=torch.int64)
    assert torch.equal(quantized_linear(x, weight)[0, 0], sums.float() * scale * scale)
    with pytest.raises(ValueError, match=f"133145 inputs is too wide for int8: {MAX_INPUTS}"):
        quantize(torch.ones(1, MAX_INPUTS + 1))
