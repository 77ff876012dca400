"""DoRA's gains are PEFT's formula, whatever the slices that the weight is read in."""

import pytest
import torch
from torch import Tensor

from worker.lora import dora
from worker.lora.dora import embedding_gain, linear_gain
from worker.spans import Span


def matrices(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (W, A, B) with B A of W's shape."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, columns), (3, columns), (rows, 3))
    weight, a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return weight, a, b


@pytest.mark.parametrize("slice_elements", [1, 40, 100, 1 << 20])
@pytest.mark.parametrize("rows", [Span(0, 20), Span(7, 16)])
def test_a_linear_module_is_scaled_to_its_magnitude(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int, rows: Span
) -> None:
    monkeypatch.setattr(dora, "_SLICE_ELEMENTS", slice_elements)
    weight, a, b = matrices(20, 30)
    magnitude = torch.linspace(-1, 2, 20)
    held = slice(rows.start, rows.stop)
    gain = linear_gain(
        lambda span: weight[span.start : span.stop], rows, a, b[held], magnitude[held]
    )
    expected = magnitude / torch.linalg.norm(weight + b @ a, dim=1)
    torch.testing.assert_close(gain, expected[held])


@pytest.mark.parametrize("slice_elements", [1, 60, 100, 1 << 20])
def test_an_embedding_is_scaled_by_hidden_feature_over_all_tokens(
    monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    monkeypatch.setattr(dora, "_SLICE_ELEMENTS", slice_elements)
    transposed, a, b = matrices(30, 20)  # 30 features, 20 tokens
    magnitude = torch.linspace(-1, 2, 30)
    gain = embedding_gain(lambda span: transposed.T[span.start : span.stop], a, b, magnitude)
    torch.testing.assert_close(gain, magnitude / torch.linalg.norm(transposed + b @ a, dim=1))


def test_a_row_that_cancels_out_or_a_huge_magnitude_has_no_finite_gain() -> None:
    weight, a, b = torch.ones(4, 5), torch.ones(1, 5), torch.zeros(4, 1)
    b[2] = -1
    rows, read = Span(0, 4), lambda span: weight[span.start : span.stop]
    assert linear_gain(read, rows, a, b, torch.ones(4)).isfinite().tolist() == [1, 1, 0, 1]
    b[2] = -0.9999999
    huge = torch.full((4,), 3e38)
    assert linear_gain(read, rows, a, b, huge).isfinite().tolist() == [1, 1, 0, 1]
    assert linear_gain(read, rows, a, b * 0, torch.zeros(4)).tolist() == [0.0] * 4
