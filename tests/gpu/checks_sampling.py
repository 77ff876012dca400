"""Sampling on the device: the tokens that the CPU kernels sample, and rows in any company.

Shapes: S rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.backend import GpuKernels
from kernels.sampling import RowSampling, sample_rows
from tests.gpu.checks import expect, expect_same
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding

_MOST_OTHERS = 0.01  # of the sampled rows: the two round sums of probabilities apart
_SIGN = 1 << 63

_KINDS = {  # (temperature, top_k, top_p, min_p)
    "greedy": (0.0, 0, 1.0, 0.0),
    "greedy by top_k": (0.7, 1, 1.0, 0.0),
    "full": (1.0, 0, 1.0, 0.0),
    "hot, min_p": (1.5, 0, 1.0, 0.05),
    "top_k": (0.8, 40, 1.0, 0.0),
    "top_p": (0.9, 0, 0.9, 0.0),
    "top_k and top_p": (1.2, 200, 0.95, 0.01),
}


def cases(place: Place) -> Iterator[Case]:
    for vocab in place.pick((128_256, 49_152), (1000,)):
        yield f"best of {vocab}", lambda vocab=vocab: best_rows(place, vocab)
        for kind in place.pick(list(_KINDS), ["greedy", "top_k and top_p"]):
            yield f"sample {kind} of {vocab}", lambda v=vocab, k=kind: drawn_rows(place, v, k)
        yield f"sample rows alone of {vocab}", lambda vocab=vocab: rows_alone(place, vocab)
        yield f"allowed of {vocab}", lambda vocab=vocab: allowed(place, vocab)


def best_rows(place: Place, vocab: int) -> Finding:
    """Ties take the lowest id, NaN wins over all, rows may be strided."""
    logits = place.randn(6, vocab + 5)[:, :vocab]
    logits[0, vocab // 3 :: 7] = 9.0
    logits[1, vocab - 1] = 99.0
    logits[2, vocab // 2] = torch.nan
    logits[3] = -torch.inf
    values, ids = GpuKernels(deterministic=False).argmax(logits)
    wanted = [vocab // 3, vocab - 1, vocab // 2, 0, *logits[4:].argmax(-1).tolist()]
    expect(ids.tolist() == wanted, f"{ids.tolist()} in place of {wanted}")
    at = torch.arange(6, device=place.device)
    expect(bool(values[2].isnan()), "the value of NaN")
    others = at != 2
    expect_same(values[others], logits[at, ids][others], "values")
    return {}


def allowed(place: Place, vocab: int) -> Finding:
    """Some rows in another order, and no number of theirs changes but those that may not come."""
    count = place.pick(64, 3)
    logits = place.randn(count, vocab)
    may_come = torch.rand(count, vocab) < 0.3
    rows = list(range(count - 1, 0, -1))
    masks = [np.packbits(may_come[row].numpy(), bitorder="little") for row in rows]
    wanted = torch.where(may_come.to(place.device), logits, -torch.inf)
    wanted[0] = logits[0]
    GpuKernels(deterministic=False).keep_allowed(logits, rows, masks)
    expect_same(logits, wanted, "rows of which some tokens may come")
    return {"note": f"{len(rows)} of {count} rows"}


def drawn_rows(place: Place, vocab: int, kind: str) -> Finding:
    """The tokens of the CPU kernels for the same logits; greedy rows without exception."""
    temperature, top_k, top_p, min_p = _KINDS[kind]
    count = place.pick(128, 4)
    logits = _logits(place, count, vocab)
    draws = [RowSampling(temperature, top_k, top_p, min_p, _seed(i)) for i in range(count)]
    positions = [7 * i for i in range(count)]
    found = _draw(logits, draws, positions).tolist()
    wanted = sample_rows(logits.cpu(), draws, positions).tolist()
    others = sum(a != b for a, b in zip(found, wanted, strict=True))
    most = 0 if draws[0].is_greedy else int(_MOST_OTHERS * count)
    expect(others <= most, f"{others} of {count} rows have another token")
    return {"note": f"{others} of {count} rows differ from the CPU's"}


def rows_alone(place: Place, vocab: int) -> Finding:
    """Every row's token among 64 rows of all kinds, alone, and turned around."""
    count, kinds = place.pick(64, 4), list(_KINDS.values())
    logits = _logits(place, count, vocab)
    draws = [RowSampling(*kinds[i % len(kinds)], _seed(i)) for i in range(count)]
    positions = range(count)
    whole = _draw(logits, draws, positions)
    turned = _draw(logits.flip(0).contiguous(), draws[::-1], positions[::-1]).flip(0)
    expect_same(turned.contiguous(), whole, "turned around")
    for first in place.pick(range(0, count, 7), (1,)):
        for size in (1, 2, 17):
            rows = slice(first, first + size)
            some = _draw(logits[rows], draws[rows], positions[rows])
            expect_same(some, whole[rows], f"{size} rows from {first}")
    return {"note": f"1, 2, 17 and {count} rows"}


def _draw(logits: Tensor, draws: Sequence[RowSampling], positions: Sequence[int]) -> Tensor:
    kernels = GpuKernels(deterministic=False)
    sent = kernels.send_draws(range(len(draws)), draws, positions, logits.device)
    return kernels.sample_rows(logits, sent)


def _logits(place: Place, count: int, vocab: int) -> Tensor:
    """Return rows as flat or as steep as models make them, some tokens forbidden."""
    logits = place.randn(count, vocab)
    logits *= torch.linspace(0.5, 4.0, count, device=place.device).unsqueeze(1)
    logits[:, ::11] = -torch.inf
    return logits


def _seed(index: int) -> int:
    return (index * 0x9E3779B97F4A7C15 + 12345) % (2 * _SIGN)
