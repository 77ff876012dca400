"""LoRA's kernels: no neighbour, order or bound of a lora_rank changes a bit of a row."""

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu.interpreted.lora_cases import NAN, Adapter, apply, make_adapter, make_rows

Crowd = tuple[Tensor, Tensor, list[Adapter], tuple[int, ...]]


@pytest.fixture(autouse=True)
def _scratch_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, NAN, **how))


@pytest.fixture(scope="module", params=[(torch.float32, 200), (torch.bfloat16, 1100)], ids=str)
def crowd(request: pytest.FixtureRequest) -> Crowd:
    """Four adapters and rows; K in two parts, as each dtype cuts it."""
    (dtype, inputs), widths = request.param, (40, 24)
    ranks = [(8, 8), (1, 0), (16, 20), (4, 2)]
    adapters = [
        make_adapter(50 * i, inputs, widths, one, dtype, has_gain=i == 2)
        for i, one in enumerate(ranks)
    ]
    return *make_rows(64, inputs, sum(widths), dtype), adapters, widths


@pytest.mark.usefixtures("dots_are_chains")
@pytest.mark.parametrize("num_rows", [2, 17, 64])
@pytest.mark.parametrize("slot", [0, 2])
def test_a_row_alone_has_the_bits_it_has_among_others(
    crowd: Crowd, num_rows: int, slot: int
) -> None:
    """Among rows of its own adapter and of others, at any place of a tile, in any order."""
    x, y, adapters, widths = crowd
    alone = apply(y[:1], x[:1], [(slot, 0, 1)], adapters, widths)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows))
    place = int((order == 0).nonzero())
    for run in ((slot, 0, num_rows), (slot, place, min(num_rows, place + 3))):
        others = [(1, 0, run[1])] if run[1] else []
        others += [(3, run[2], num_rows)] if run[2] < num_rows else []
        out = apply(y[order], x[order], [*others, run], adapters, widths)
        assert torch.equal(out[place], alone[0])


@pytest.mark.usefixtures("dots_are_chains")
def test_the_bits_do_not_depend_on_max_lora_rank_or_on_the_slot(crowd: Crowd) -> None:
    x, y, adapters, widths = crowd
    x, y = x[:5], y[:5]
    runs = [(2, 0, 3), (0, 3, 5)]
    out = apply(y, x, runs, adapters, widths)
    assert torch.equal(out, apply(y, x, runs, adapters, widths, max_lora_rank=61))
    shuffled = [adapters[0], adapters[2]]
    assert torch.equal(out, apply(y, x, [(0, 3, 5), (1, 0, 3)], shuffled, widths, 48))


@pytest.mark.usefixtures("dots_are_chains")
def test_how_the_work_is_shared_changes_no_bit(crowd: Crowd) -> None:
    """Nor does what lies behind the tiles that count."""
    x, y, adapters, widths = crowd
    for runs in ([(2, 0, 3), (0, 3, 5)], [(1, 0, 1), (2, 1, 40), (3, 40, 41), (0, 41, 64)]):
        out = apply(y, x, runs, adapters, widths)
        padding = [(-7, 0, 0), (1 << 20, 99, 99)]
        shared = apply(y, x, runs, adapters, widths, padding=padding, with_shares=True)
        assert torch.equal(out, shared)


def test_a_neighbours_nan_stays_with_the_neighbour(
    crowd: Crowd,
) -> None:
    x, y, adapters, widths = crowd
    runs = [(0, 0, 2), (3, 3, 5)]
    out = apply(y[:5], x[:5], runs, adapters, widths)
    bad = x[:5].clone()
    bad[1], bad[2] = NAN, NAN
    with_bad = apply(y[:5], bad, runs, adapters, widths)
    assert with_bad[1].isnan().all()
    keeps = [0, 2, 3, 4]
    assert torch.equal(with_bad[keeps], out[keeps])


def test_tiles_that_pad_a_graph_do_nothing_whatever_their_slot(
    crowd: Crowd,
) -> None:
    x, y, adapters, widths = crowd
    runs = [(0, 0, 2)]
    out = apply(y[:4], x[:4], runs, adapters, widths)
    padding = [(-7, 0, 0), (1 << 20, 3, 3), (0, 99, 99)]
    assert torch.equal(out, apply(y[:4], x[:4], runs, adapters, widths, padding=padding))
