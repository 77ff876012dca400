"""LoRA's kernels: what they add to which rows."""

import numpy as np
import pytest
import torch

from kernels.gpu.lora.apply import NUM_SHARES, TILE_ROWS, cut_tiles, lora_apply, share_tiles
from tests.kernels.gpu.bounds import OutOfBounds, reachable
from tests.kernels.gpu.interpreted.lora_cases import (
    GATES,
    NAN,
    Adapter,
    aligned,
    apply,
    check,
    error,
    make_adapter,
    make_rows,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _scratch_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, NAN, **how))


def test_runs_are_cut_into_tiles_of_at_most_sixteen_rows() -> None:
    runs = [(3, 0, 1), (0, 5, 5), (7, 5, 38), (3, 40, 56)]
    tiles = [(3, 0, 1), (7, 5, 21), (7, 21, 37), (7, 37, 38), (3, 40, 56)]
    assert TILE_ROWS == 16
    assert cut_tiles(runs) == tiles
    assert cut_tiles([]) == []


@pytest.mark.parametrize("ranks", [[8], [16] * 64, [8, 64] * 30, [1, 256, 0, 17], [5] * 700])
def test_shares_of_the_work_are_neighbours_and_cost_alike(ranks: list[int]) -> None:
    tiles = [(number % 5, 16 * number, 16 * number + 9) for number in range(len(ranks))]
    shares = share_tiles(tiles, ranks)
    places = shares[:, 0]
    assert places[0] == 0 and places[-1] == len(ranks) << 16 and (np.diff(places) >= 0).all()
    costs = np.maximum(1, -(-np.array(ranks) // 16))
    done = np.interp(places / (1 << 16), np.arange(len(ranks) + 1), [0, *np.cumsum(costs)])
    assert np.abs(np.diff(done) - costs.sum() / NUM_SHARES).max() < costs.max() / (1 << 14)
    assert shares[:-1, 1:].tolist() == [list(tiles[place >> 16]) for place in places[:-1]]


def test_without_tiles_no_share_has_any_work() -> None:
    assert (share_tiles([], []) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_lora_ranks_stand_in_one_batch_each_with_its_own_adapter(dtype: torch.dtype) -> None:
    widths = (40, 16, 24)
    lora_ranks = [(1, 0, 2), (8, 8, 8), (12, 0, 12), (16, 16, 0), (0, 64, 1), (0, 0, 0), (0, 2, 17)]
    adapters = [
        make_adapter(100 * i, 72, widths, ranks, dtype, has_gain=i in (2, 4), has_shift=i in (1, 4))
        for i, ranks in enumerate(lora_ranks)
    ]
    adapters[5].gain = aligned(sum(widths), dtype=torch.float32, seed=1)  # of lora_rank 0: unused
    runs = [(4, 1, 4), (0, 4, 21), (2, 22, 23), (5, 23, 25), (3, 25, 26), (1, 26, 27), (6, 28, 29)]
    x, y = make_rows(30, 72, sum(widths), dtype)
    out = apply(y, x, runs, adapters, widths)
    assert torch.equal(out[23:25], y[23:25])
    check(y, x, [run for run in runs if run[0] != 5], adapters, widths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_module_of_a_large_lora_rank(dtype: torch.dtype) -> None:
    adapter = make_adapter(7, 40, (24,), (256,), dtype)
    x, y = make_rows(3, 40, 24, dtype)
    check(y, x, [(0, 0, 2)], [adapter], (24,))


@pytest.mark.parametrize(
    ("inputs", "widths", "lora_ranks"),
    [
        (576, (576, 192, 192), (4, 4, 2)),
        (576, (1536, 1536), (2, 0)),
        (1536, (576,), (16,)),
        (1100, (136, 130), (3, 20)),
        (72, (72, 200), (16, 5)),
        (72, (130, 40, 8, 24), (4, 20, 3, 1)),
    ],
)
def test_widths_of_models_and_odd_ones(
    inputs: int, widths: tuple[int, ...], lora_ranks: tuple[int, ...]
) -> None:
    adapter = make_adapter(3, inputs, widths, lora_ranks, torch.bfloat16, has_gain=True)
    x, y = make_rows(3, inputs, sum(widths), torch.bfloat16)
    check(y, x, [(0, 1, 3)], [adapter], widths)


@pytest.mark.parametrize(("inputs", "dtype"), [(2100, torch.bfloat16), (300, torch.float32)])
def test_parts_of_k_are_all_added_once(inputs: int, dtype: torch.dtype) -> None:
    adapter = make_adapter(5, inputs, (16,), (5,), dtype)
    x, y = make_rows(17, inputs, 16, dtype)
    check(y, x, [(0, 0, 17)], [adapter], (16,))


def test_rows_that_are_not_rounded_yet_take_a_delta_of_narrow_weights() -> None:
    """A part of a sum over ranks is float32 beside bfloat16 inputs and adapters."""
    adapter = make_adapter(6, 96, (40, 24), (8, 4), torch.bfloat16)
    x, _ = make_rows(5, 96, 64, torch.bfloat16)
    _, y = make_rows(5, 96, 64, torch.float32)
    out = apply(y, x, [(0, 0, 4)], [adapter], (40, 24))
    wanted = adapter.reference(y[:4], x[:4])
    assert (out[:4] - wanted).norm() <= 1e-4 * wanted.norm()
    assert torch.equal(out[4], y[4])


def test_the_inner_vector_is_not_rounded_to_bfloat16() -> None:
    """A difference of two large parts of u keeps what bfloat16 would lose of each."""
    adapter = make_adapter(5, 64, (16,), (2,), torch.bfloat16)
    adapter.a[1] = adapter.a[0]
    adapter.a[1, 0] += 2**-9
    adapter.blocks[0][0], adapter.blocks[0][1] = 1.0, -1.0
    x, _ = make_rows(4, 64, 16, torch.bfloat16)
    x = 64 * x
    y = torch.zeros(4, 16, dtype=torch.bfloat16)
    out = apply(y, x, [(0, 0, 4)], [adapter], (16,))
    assert error(out, adapter.reference(y, x)) <= GATES[torch.bfloat16]


def test_a_large_inner_vector_stays_finite_in_float16() -> None:
    adapter = make_adapter(5, 64, (16,), (2,), torch.float16)
    adapter.a.fill_(60.0)
    adapter.blocks[0].fill_(1e-4)
    x, y = torch.full((1, 64), 60.0, dtype=torch.float16), torch.zeros(1, 16, dtype=torch.float16)
    out = apply(y, x, [(0, 0, 1)], [adapter], (16,))
    assert error(out, adapter.reference(y, x)) <= GATES[torch.float16]


def test_gain_is_rounded_before_shift_and_delta_are_added() -> None:
    adapter = make_adapter(5, 16, (16,), (1,), torch.float32, has_gain=True, has_shift=True)
    x, y = make_rows(8, 16, 16, torch.float32)
    out = apply(y, x, [(0, 0, 8)], [adapter], (16,))
    delta = apply(torch.zeros_like(y), x, [(0, 0, 8)], [Adapter(adapter.a, adapter.blocks)], (16,))
    assert adapter.gain is not None and adapter.shift is not None
    assert torch.equal(out, (y * adapter.gain + adapter.shift) + delta)


def test_rows_of_a_wider_tensor_are_changed_in_place() -> None:
    adapter = make_adapter(5, 32, (16,), (2,), torch.float32)
    x, y = make_rows(3, 32, 16, torch.float32)
    wide = torch.full((3, 20), 7.0)
    wide[:, 2:18] = y
    table = torch.tensor([adapter.fields()])
    tiles = torch.tensor([(0, 0, 3)], dtype=torch.int32)
    with reachable(*adapter.kept):
        lora_apply(wide[:, 2:18], x, tiles, table, (16,), torch.float32, 2)
    assert torch.equal(wide[:, 2:18], apply(y, x, [(0, 0, 3)], [adapter], (16,)))
    assert (wide[:, :2] == 7).all() and (wide[:, 18:] == 7).all()


def test_an_adapter_that_was_not_named_is_out_of_bounds() -> None:
    adapter = make_adapter(5, 32, (16,), (2,), torch.float32)
    x, y = make_rows(1, 32, 16, torch.float32)
    table = torch.tensor([adapter.fields()])
    tiles = torch.tensor([(0, 0, 1)], dtype=torch.int32)
    with pytest.raises(OutOfBounds):
        lora_apply(y, x, tiles, table, (16,), torch.float32, 2)


def test_no_tiles_or_no_lora_rank_change_nothing() -> None:
    x, y = make_rows(1, 32, 16, torch.float32)
    table, none = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int32)
    before = y.clone()
    lora_apply(y, x, none, table, (16,), torch.float32, 8)
    lora_apply(y, x, torch.tensor([(0, 0, 1)], dtype=torch.int32), table, (16,), torch.float32, 0)
    assert torch.equal(y, before)
