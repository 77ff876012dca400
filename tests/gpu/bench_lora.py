"""Times of LoRA's kernels for one layer of Llama-3.1-8B: all four fused linears.

The floor reads every adapter in use once, reads x and y and writes y; scratch does not count.

Shapes: T rows, K inputs, N outputs.
"""

from collections.abc import Iterator, Sequence

import torch

from kernels.gpu.lora.apply import cut_tiles, lora_apply, share_tiles
from tests.gpu.adapters import Slots, make_slots
from tests.gpu.bench import line, moved_floor, read_floor
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding
from tests.gpu.timing import Call, num_sets, time_calls

_LINEARS = (
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14_336, 14_336)),
    (14_336, (4096,)),
)
_TOYS = ((72, (72, 24, 24)), (72, (72,)))
_BF16 = torch.bfloat16


def cases(place: Place) -> Iterator[Case]:
    rows, prompt, some = place.pick(64, 4), place.pick(2048, 20), place.pick(8, 2)

    def one(num_rows: int, num_adapters: int, **goal: float) -> Case:
        name = f"LoRA layer, r16, adapters {num_adapters}, rows {num_rows:,}"
        return name, lambda: layer(place, num_rows, [16] * num_adapters, **goal)

    yield one(rows, rows, at_least=1 / 1.5)
    yield one(rows, 1, at_most_us=22.0)
    yield one(rows, some)
    yield one(1, 1)
    yield one(prompt, some, at_least=1 / 1.5)
    yield f"LoRA layer, half r8, half r64, adapters {rows}, rows {rows}", lambda: mixed(place, rows)


def layer(
    place: Place,
    num_rows: int,
    lora_ranks: Sequence[int],
    *,
    at_least: float | None = None,
    at_most_us: float | None = None,
) -> Finding:
    """Time one layer whose rows are dealt evenly to adapters of these lora_ranks."""
    calls, adapter_bytes, row_bytes = _calls(place, num_rows, lora_ranks)
    floor = read_floor(place, adapter_bytes) + moved_floor(place, row_bytes)
    found = line(place, calls, floor, at_least=at_least, at_most_us=at_most_us)
    if at_least is not None:
        found["goal"] = "<= 1.5x floor"
    return found


def mixed(place: Place, num_rows: int) -> Finding:
    """Small and large adapters in one batch cost what each costs by itself, not the largest."""
    half = num_rows // 2
    parts = [
        time_calls(place, _calls(place, num_rows, [lora_rank] * num_rows)[0]).median * 1e6
        for lora_rank in (8, 64)
    ]
    found = layer(place, num_rows, [8, 64] * half)
    expected = sum(parts) / 2
    found["goal"], found["met"] = "<= 1.1x true ranks", found["us"] <= 1.1 * expected
    found["beside"] = (
        f"all r8 {parts[0]:.4g} us, all r64 {parts[1]:.4g} us, half of each {expected:.4g} us"
    )
    return found


def _calls(place: Place, num_rows: int, lora_ranks: Sequence[int]) -> tuple[list[Call], int, int]:
    """Return calls of a layer, and the bytes of adapters and of rows that each moves."""
    linears = place.pick(_LINEARS, _TOYS)
    features = sum(inputs + 2 * sum(widths) for inputs, widths in linears)
    row_bytes = 2 * num_rows * features
    stacked = sum(
        2 * rank * (len(widths) * inputs + sum(widths))
        for rank in lora_ranks
        for inputs, widths in linears
    )
    count = place.pick(num_sets(stacked + row_bytes), 1)
    return [_one_layer(place, num_rows, lora_ranks) for _ in range(count)], stacked, row_bytes


def _one_layer(place: Place, num_rows: int, lora_ranks: Sequence[int]) -> Call:
    """Return a call that adds the LoRAs of a layer to what its linears made."""
    count = len(lora_ranks)
    bounds = [num_rows * i // count for i in range(count + 1)]
    cut = cut_tiles([(i, bounds[i], bounds[i + 1]) for i in range(count)])
    shares = place.int32(share_tiles(cut, [lora_ranks[slot] for slot, _, _ in cut]))
    room = num_rows if num_rows <= 64 else len(cut)  # as in a graph
    tiles = place.int32(cut + [(0, 0, 0)] * (room - len(cut)))
    work: list[tuple[torch.Tensor, torch.Tensor, Slots]] = []
    for inputs, widths in place.pick(_LINEARS, _TOYS):
        slots = make_slots(place, inputs, widths, [[r] * len(widths) for r in lora_ranks], _BF16)
        x = place.randn(num_rows, inputs, dtype=_BF16)
        # Replays add to y again and again: small enough to stay finite.
        work.append((place.randn(num_rows, sum(widths), dtype=_BF16), x * 1e-3, slots))

    def call() -> None:
        for y, x, slots in work:
            lora_apply(y, x, tiles, slots.table, slots.widths, _BF16, slots.max_lora_rank, shares)

    return call
