"""LoRA on the device: mixed lora_ranks against float64, and rows to the bit in any company.

Shapes: T rows, K inputs, N outputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.gpu.lora.apply import cut_tiles, lora_apply
from tests.gpu.adapters import Slots, make_slots
from tests.gpu.checks import DTYPES, LORA_GATES, expect_near, expect_same
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding

Run = tuple[int, int, int]  # slot, first row, end row

LINEARS = {  # (inputs, widths of the modules)
    "qkv of Llama-3.1-8B": (4096, (4096, 1024, 1024)),
    "down of Llama-3.1-8B": (14_336, (4096,)),
    "gate_up of SmolLM2": (576, (1536, 1536)),
    "odd widths": (72, (72, 24, 40)),
}
_RANKS = (1, 2, 8, 12, 16, 64, 256, 0)


def cases(place: Place) -> Iterator[Case]:
    for name, (num_inputs, widths) in LINEARS.items():
        for dtype in DTYPES:
            if place.is_dry and (name, dtype) != ("odd widths", "bfloat16"):
                continue
            args = (place, num_inputs, widths, DTYPES[dtype])
            yield f"LoRA {dtype} {name}", lambda args=args: near(*args)
            yield f"LoRA rows alone {dtype} {name}", lambda args=args: alone(*args)


def near(place: Place, num_inputs: int, widths: tuple[int, ...], dtype: torch.dtype) -> Finding:
    """Every lora_rank in one batch, modules missing, DoRA, rows of no adapter in between."""
    slots = make_slots(place, num_inputs, widths, _mixed(place, widths), dtype, dora=(2, 5))
    counts = place.pick([1, 17, 3, 16, 1, 40, 5, 9], [1, 17, 2])
    runs, row = [], 2  # two rows before the first and one behind each run have no adapter
    for slot, count in enumerate(counts):
        runs.append((slot, row, row + count))
        row += count + 1
    x, y = _rows(place, row, num_inputs, widths, dtype)
    adapted = torch.zeros(row, dtype=torch.bool, device=place.device)
    for _, first, end in runs:
        adapted[first:end] = True
    x[~adapted] = torch.nan
    before = y.clone()
    y[~adapted] = torch.nan
    apply(place, y, x, slots, runs)
    assert bool(y[~adapted].isnan().all()), "rows of no adapter were written"
    errors = []
    for slot, first, end in runs:
        wanted = slots.slots[slot].apply(before[first:end], x[first:end])
        gate = LORA_GATES[dtype]
        errors.append(expect_near(y[first:end], wanted, gate, f"lora_ranks {_of(slots, slot)}"))
    return {"error": max(errors), "gate": LORA_GATES[dtype], "note": f"{len(runs)} adapters"}


def alone(place: Place, num_inputs: int, widths: tuple[int, ...], dtype: torch.dtype) -> Finding:
    """Each row to the bit: alone, among 2, 17 and 64, adapters in any order, room to spare."""
    slots = make_slots(place, num_inputs, widths, _mixed(place, widths), dtype, dora=(1,))
    num_slots, count = len(slots.slots), place.pick(64, 6)
    slot_by_row = [(5 * row) % num_slots for row in range(count)]
    x, y = _rows(place, count, num_inputs, widths, dtype)
    whole = y.clone()
    apply(place, whole, x, slots, [(slot, i, i + 1) for i, slot in enumerate(slot_by_row)])

    def check(rows: Sequence[int], what: str, more: int = 0) -> None:
        at = torch.tensor(rows, device=place.device)
        runs = _joined([slot_by_row[row] for row in rows])
        found = y[at].clone()
        apply(place, found, x[at].contiguous(), slots, runs, more)
        expect_same(found, whole[at], what)

    by_slot = sorted(range(count), key=lambda row: slot_by_row[row])
    check(by_slot, "adapters together")
    check(by_slot[::-1], "adapters turned around", more=64)
    for size in (1, 2, 17):
        for first in place.pick((0, 11, 40), (1,)):
            check(by_slot[first : first + size], f"{size} rows from {first}")
    same = [row for row in range(count) if slot_by_row[row] == slot_by_row[1]]
    check(same, "one adapter")
    return {"note": f"1, 2, 17 and {count} rows"}


def apply(
    place: Place, y: Tensor, x: Tensor, slots: Slots, runs: Sequence[Run], more: int = 0
) -> None:
    """Apply runs of adapters, with empty tiles of a slot that is nowhere as a graph has them."""
    tiles = [*cut_tiles(runs), (1 << 20, 0, 0), (0, 0, 0)]
    used = max((slots.slots[slot].a.shape[0] for slot, _, _ in runs), default=0)
    lora_apply(y, x, place.int32(tiles), slots.table, slots.widths, slots.dtype, used + more)


def _mixed(place: Place, widths: tuple[int, ...]) -> list[list[int]]:
    """Return lora_ranks of all sizes, the same or not in all modules, some of them missing."""
    ranks = place.pick(_RANKS, (1, 12, 20))
    same = [[rank] * len(widths) for rank in ranks]
    if len(widths) > 1:
        same[1][0] = 0
        same[2] = [ranks[(2 + i) % 3] for i in range(len(widths))]
    return same


def _rows(
    place: Place, count: int, num_inputs: int, widths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x = place.randn(count, num_inputs, dtype=dtype)
    return x, place.randn(count, sum(widths), dtype=dtype)


def _joined(slots: Sequence[int]) -> list[Run]:
    """Return runs of neighbouring rows of one slot."""
    runs: list[Run] = []
    for row, slot in enumerate(slots):
        if runs and runs[-1][0] == slot:
            runs[-1] = (slot, runs[-1][1], row + 1)
        else:
            runs.append((slot, row, row + 1))
    return runs


def _of(slots: Slots, slot: int) -> list[int]:
    return slots.slots[slot].lora_ranks
