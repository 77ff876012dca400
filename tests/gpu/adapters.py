"""Random LoRAs of one fused linear, found by address as kernels.gpu.lora.apply wants them.

Owns the tensors and the table that names their addresses; a table is worth nothing without them.

Shapes: K inputs, N outputs, M modules, R stacked lora_rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.gpu.place import Place

_ALIGNMENT = 64  # bytes, of A and of each block of B


@dataclass(frozen=True, slots=True)
class Slot:
    """One adapter's part of a fused linear."""

    a: Tensor  # [R, K]
    blocks: list[Tensor]  # of each module B transposed, [lora_rank, width]
    gain: Tensor | None  # [N] float32
    shift: Tensor | None  # [N] float32

    @property
    def lora_ranks(self) -> list[int]:
        return [block.shape[0] for block in self.blocks]

    def line(self) -> list[int]:
        """Return its line of the table."""
        if self.a.shape[0] == 0:
            return [0] * (5 + 3 * len(self.blocks))
        vectors = [0 if x is None else _address(x) for x in (self.gain, self.shift)]
        line = [_address(self.a), self.a.shape[0], *vectors, 0]
        first = 0
        for block in self.blocks:
            line += [_address(block) if block.numel() else 0, first, block.shape[0]]
            first += block.shape[0]
        return line

    def apply(self, y: Tensor, x: Tensor) -> Tensor:
        """Return gain y + shift + B A x of rows in float64."""
        y, u = y.double(), x.double() @ self.a.double().T
        if self.a.shape[0] == 0:
            return y
        y = y if self.gain is None else y * self.gain.double()
        y = y if self.shift is None else y + self.shift.double()
        parts = u.split(self.lora_ranks, dim=1)
        return y + torch.cat(
            [part @ b.double() for part, b in zip(parts, self.blocks, strict=True)], dim=1
        )


@dataclass(frozen=True, slots=True)
class Slots:
    """All adapters of one fused linear."""

    slots: list[Slot]
    table: Tensor  # [slots, 4 + 3 M] int64
    widths: tuple[int, ...]
    dtype: torch.dtype

    @property
    def max_lora_rank(self) -> int:
        return max(slot.a.shape[0] for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        return sum(slot.a.nbytes + sum(b.nbytes for b in slot.blocks) for slot in self.slots)


def make_slots(
    place: Place,
    num_inputs: int,
    widths: tuple[int, ...],
    lora_ranks: Sequence[Sequence[int]],
    dtype: torch.dtype,
    dora: Sequence[int] = (),
) -> Slots:
    """Return an adapter for each entry of `lora_ranks`, which tells those of its modules.

    Args:
        place: where.
        num_inputs: K.
        widths: outputs of each module.
        lora_ranks: of each adapter, of each module; 0: not adapted.
        dtype: of A and B.
        dora: which of them have gain and shift.
    """
    slots = []
    for index, ranks in enumerate(lora_ranks):
        a = _aligned(place.randn(sum(ranks), num_inputs, dtype=dtype, scale=num_inputs**-0.5))
        blocks = [
            _aligned(place.randn(rank, width, dtype=dtype, scale=max(rank, 1) ** -0.5))
            for rank, width in zip(ranks, widths, strict=True)
        ]
        has_dora = index in dora
        gain = 1 + place.randn(sum(widths), scale=0.3) if has_dora else None
        slots.append(Slot(a, blocks, gain, place.randn(sum(widths)) if has_dora else None))
    table = place.int64([slot.line() for slot in slots])
    return Slots(slots, table, widths, dtype)


def _aligned(x: Tensor) -> Tensor:
    """Return a copy that starts on 64 bytes, as the CPU's memory does not always."""
    spare = _ALIGNMENT // x.itemsize
    room = torch.empty(x.numel() + spare, dtype=x.dtype, device=x.device)
    skipped = -room.data_ptr() % _ALIGNMENT // x.itemsize
    copy = room[skipped : skipped + x.numel()].view(x.shape)
    copy.copy_(x)
    return copy


def _address(x: Tensor) -> int:
    return x.data_ptr()
