"""kernels.quantized: codes and scales of weights and of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.quantized import (
    MAX_INPUTS,
    dequantize,
    quantize,
    quantize_rows,
    quantized_linear,
    rotate,
)
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
    rotated = rotate(weight)
    assert torch.equal(quantized.scales, rotated.abs().amax(1) / torch.tensor(127.0))
    found = quantized.codes * quantized.scales.unsqueeze(1)
    off = (found - rotated).abs().amax(1)
    assert bool((off <= 0.5001 * quantized.scales).all())
    torch.testing.assert_close(dequantize(quantized), rotate(found))
    pieces = torch.cat([quantize_rows(row.unsqueeze(0))[0] for row in rotated])
    assert torch.equal(quantized.codes, pieces)


@pytest.mark.parametrize("width", [1, 31, 32, 64, 100])
def test_a_rotation_is_its_own_inverse_and_keeps_products(width: int) -> None:
    drawn = torch.Generator().manual_seed(width)
    x, y = (torch.randn(5, width, generator=drawn) for _ in range(2))
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close(rotate(x) @ rotate(y).T, x @ y.T)
    rest = width // 32 * 32
    assert torch.equal(rotate(x)[:, rest:], x[:, rest:])


def test_a_rotation_is_by_the_hadamard_matrix() -> None:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < 32:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    torch.testing.assert_close(rotate(torch.eye(32)), matrix / 32**0.5)


@pytest.mark.parametrize("side", ["row", "weight"])
def test_a_large_number_takes_few_bits_of_others(side: str) -> None:
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    (x if side == "row" else weight)[:, 40] = 25.0
    right = x.double() @ weight.double().T
    rotated, plain = (
        quantized_linear(x, quantize(weight, "int8", is_rotated=is_rotated))
        for is_rotated in (True, False)
    )
    errors = [(y.double() - right).norm() for y in (rotated, plain)]
    assert errors[0] < 0.5 * errors[1]


def test_a_product_of_the_widest_row_is_still_exact_and_a_wider_one_is_refused() -> None:
    x = torch.ones(1, MAX_INPUTS)
    weight = quantize(x, "int8", is_rotated=False)
    scale = torch.tensor(1.0) / 127
    sums = torch.tensor(127**2 * MAX_INPUTS, dtype=torch.int64)
    assert torch.equal(quantized_linear(x, weight)[0, 0], sums.float() * scale * scale)
    with pytest.raises(ValueError, match=f"133145 inputs is too wide for int8: {MAX_INPUTS}"):
        quantize(torch.ones(1, MAX_INPUTS + 1), "int8")


def test_a_weight_in_int4_has_scales_and_offsets_that_leave_little_error() -> None:
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    weight[7, 32:64] = 0.0
    weight[8, 40], weight[9, 99] = torch.nan, torch.inf
    weight[10, 96:] = 0.5
    quantized = quantize(weight, "int4")
    assert quantized.offsets is not None
    for of_groups in (quantized.scales, quantized.offsets):
        assert of_groups.shape == (50, 4) and of_groups.dtype == torch.bfloat16
    assert quantized.codes.min() == 0 and quantized.codes.max() == 15
    bad = quantized.scales.isnan().nonzero().tolist()
    assert bad == [[8, 1], [9, 3]]
    meant = dequantize(quantized)
    assert meant.shape == weight.shape and meant[8, 32:64].isnan().all()
    assert not meant[7, 32:64].any() and bool(meant[10, 96:].eq(0.5).all())
    sound = torch.arange(50) >= 11
    error = (meant - weight)[sound].norm() / weight[sound].norm()
    groups = weight[sound, :96].view(-1, 3, 32)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (most - least) / 15
    plain = ((groups - least) / scales).round() * scales + least
    of_the_range = (plain - groups).norm() / groups.norm()
    assert error < 0.075 and error < 0.97 * of_the_range


def test_a_weight_that_was_in_4_bits_of_any_range_keeps_its_numbers() -> None:
    drawn = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (64, 32), generator=drawn).float()
    codes[:, 0], codes[:, 1] = 0, 15  # all of the range
    scales = torch.rand(64, 1, generator=drawn).add(0.1).bfloat16().float()
    offsets = torch.randn(64, 1, generator=drawn).bfloat16().float()
    weight = codes * scales + offsets
    quantized = quantize(weight, "int4")
    assert torch.equal(quantized.codes, codes.to(torch.int8))
    torch.testing.assert_close(dequantize(quantized), weight, atol=0.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_codes_of_4_bits_that_share_a_scale_with_others_are_found_again(
    group: int, dtype: torch.dtype, *, has_offsets: bool
) -> None:
    """With a zero as GPTQ and AWQ have it or an offset as Q4_1 and Q4_K, rounded as GGUF's are."""
    drawn = torch.Generator().manual_seed(1)
    codes = torch.randn(64, 256, generator=drawn).mul(2.5).add(8).round().clamp(0, 15)
    codes[0, :32] = 8
    codes[1, :32] = torch.arange(32) % 2 + 3
    scales = torch.rand(64, 256 // group, generator=drawn).add(0.1).half().float()
    steps = scales.repeat_interleave(group, dim=1)
    weight = (codes - 8) * steps
    if has_offsets:
        offsets = torch.rand(64, 256 // group, generator=drawn).half().float()
        weight = codes * steps - 8 * steps * offsets.repeat_interleave(group, dim=1)
    weight = weight.to(dtype).float()
    found, anew = (dequantize(quantize(weight, "int4", is_coded=one)) for one in (True, False))
    # Scales and offsets have the 8 digits of bfloat16.
    assert bool(((found - weight).abs() < 0.06 * steps).all())
    assert (anew - weight).norm() > 10 * (found - weight).norm()
    random = torch.randn(8, 256, generator=drawn)
    assert (dequantize(quantize(random, "int4", is_coded=True)) - random).norm() <= (
        dequantize(quantize(random, "int4")) - random
    ).norm() * (1 + 1e-6)


@settings(max_examples=num_cases(100), deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=70), st.booleans())
def test_no_numbers_make_codes_that_are_none(numbers: list[float], is_coded: bool) -> None:
    quantized = quantize(torch.tensor([numbers]), "int4", is_coded=is_coded)
    assert quantized.offsets is not None
    assert bool(((quantized.codes >= 0) & (quantized.codes <= 15)).all())
    assert not quantized.scales.isnan().any() and not quantized.offsets.isnan().any()


def test_a_product_in_int4_is_about_what_its_numbers_give() -> None:
    drawn = torch.Generator().manual_seed(1)
    x, weight = torch.randn(3, 70, generator=drawn), torch.randn(5, 70, generator=drawn)
    x[:, 40] *= 100.0  # which takes bits of its own group alone
    bias = torch.randn(5, generator=drawn)
    quantized = quantize(weight, "int4")
    right = x.double() @ dequantize(quantized).double().T + bias.double()
    of_rows = torch.zeros_like(x)
    for first in (0, 32, 64):
        codes, scales = quantize_rows(x[:, first : first + 32])
        of_rows[:, first : first + 32] = codes.float() * scales.unsqueeze(1)
    assert (of_rows[:, :32] - x[:, :32]).abs().max() < 0.02
    exact = of_rows.double() @ dequantize(quantized).double().T + bias.double()
    y = quantized_linear(x, quantized, bias)
    torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=1e-5)
    assert (exact - right).abs().max() < 10.0
