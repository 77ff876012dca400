"""DoRA: the gain magnitude / |W + B A| of a module's outputs, computed once when it is loaded.

The norms take whole rows of the adapted weight, of the embedding whole columns, so each rank reads
what it lacks of W from the checkpoint and asks no other rank. Works in float32 and a slice at a
time.

Shapes: R lora_rank, K inputs, N outputs, V the whole vocabulary, H hidden. B comes scaled.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from worker.spans import Span

_SLICE_ELEMENTS = 1 << 20  # of a weight, in float32: 4 MB

ReadRows = Callable[[Span], Tensor]  # of a weight, in any dtype


def linear_gain(read: ReadRows, rows: Span, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
    """Return the gain [N] of the outputs `rows` of a linear module.

    It is not finite where the adapted weight has a row of zeros.

    Args:
        read: gives rows of W, [*, K].
        rows: N outputs.
        a: [R, K].
        b: [N, R], times the scaling.
        magnitude: [N].
    """
    norms = torch.empty(len(rows))
    for span in _slices(rows, a.shape[1]):
        here = slice(span.start - rows.start, span.stop - rows.start)
        adapted = read(span).float() + b[here] @ a
        norms[here] = torch.linalg.vector_norm(adapted, dim=1)
    return magnitude / norms


def embedding_gain(read: ReadRows, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
    """Return the gain [H] of the hidden features of an embedding.

    It is not finite where the adapted table has a column of zeros.

    Args:
        read: gives rows of the table, [*, H].
        a: [R, V].
        b: [H, R], times the scaling.
        magnitude: [H].
    """
    squares = torch.zeros(b.shape[0], dtype=torch.float64)
    for span in _slices(Span(0, a.shape[1]), b.shape[0]):
        adapted = read(span).float() + a[:, span.start : span.stop].T @ b.T
        squares += adapted.double().square_().sum(0)
    return magnitude / squares.sqrt_().float()


def _slices(rows: Span, width: int) -> Iterator[Span]:
    step = max(1, _SLICE_ELEMENTS // width)
    for start in range(rows.start, rows.stop, step):
        yield Span(start, min(start + step, rows.stop))
