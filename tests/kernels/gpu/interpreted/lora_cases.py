"""Adapters, the table that tells where they are, and what they mean in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.lora.apply import cut_tiles, lora_apply, share_tiles
from tests.kernels.gpu.bounds import reachable

GATES = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}
NAN = float("nan")


@dataclass
class Adapter:
    """One slot's tensors for a fused linear, and the fields that tell where they are."""

    a: Tensor
    blocks: list[Tensor]  # of each module [its lora_rank, width]
    gain: Tensor | None = None
    shift: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)

    def fields(self) -> list[int]:
        row = [self._address(self.a), self.a.shape[0]]
        row += [0 if one is None else self._address(one) for one in (self.gain, self.shift)]
        row.append(0)  # no scales
        first = 0
        for block in self.blocks:
            row += [self._address(block), first, block.shape[0]]
            first += block.shape[0]
        return row

    def _address(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def reference(self, y: Tensor, x: Tensor) -> Tensor:
        """Return gain y + shift + B (A x) in float64."""
        y, first, output = y.double(), 0, 0
        y = y if self.gain is None else y * self.gain.double()
        y = y if self.shift is None else y + self.shift.double()
        for block in self.blocks:
            a = self.a[first : first + block.shape[0]].double()
            y[:, output : output + block.shape[1]] += reference.lora(
                x.double(), a, block.T.double()
            )
            first, output = first + block.shape[0], output + block.shape[1]
        return y


def aligned(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Return normal values that start on 64 bytes, in a storage of exactly their size past that."""
    values = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    data = torch.full((values.numel() + 64,), NAN, dtype=dtype)
    start = -data.data_ptr() % 64 // dtype.itemsize
    data = data[start : start + values.numel()].view(shape)
    return data.copy_(values)


def make_adapter(
    seed: int,
    inputs: int,
    widths: Sequence[int],
    lora_ranks: Sequence[int],
    dtype: torch.dtype,
    has_gain: bool = False,
    has_shift: bool = False,
) -> Adapter:
    def vector(more: int) -> Tensor:
        return aligned(sum(widths), dtype=torch.float32, seed=seed + more)

    return Adapter(
        aligned(sum(lora_ranks), inputs, dtype=dtype, seed=seed, scale=inputs**-0.5),
        [
            aligned(
                lora_rank, width, dtype=dtype, seed=seed + 1 + i, scale=(lora_rank or 1) ** -0.5
            )
            for i, (width, lora_rank) in enumerate(zip(widths, lora_ranks, strict=True))
        ],
        vector(8) if has_gain else None,
        vector(9) if has_shift else None,
    )


def make_rows(
    num_rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x, y = torch.randn(num_rows, inputs + outputs, generator=generator).split(
        [inputs, outputs], dim=1
    )
    return x.to(dtype), y.to(dtype).contiguous()  # x: rows of a wider tensor


def apply(
    y: Tensor,
    x: Tensor,
    runs: Sequence[tuple[int, int, int]],
    adapters: Sequence[Adapter],
    widths: tuple[int, ...],
    max_lora_rank: int | None = None,
    padding: Sequence[tuple[int, int, int]] = (),
    with_shares: bool = False,
) -> Tensor:
    """Apply adapters, slot i the i-th, to a copy of y and return it."""
    table = torch.tensor([adapter.fields() for adapter in adapters])
    most = max(adapter.a.shape[0] for adapter in adapters)
    cut = cut_tiles(runs)
    tiles = torch.tensor([*cut, *padding], dtype=torch.int32)
    ranks = [adapters[slot].a.shape[0] for slot, _, _ in cut]
    shares = torch.from_numpy(share_tiles(cut, ranks)) if with_shares else None
    out = y.clone()
    with reachable(*(tensor for adapter in adapters for tensor in adapter.kept)):
        lora_apply(out, x, tiles, table, widths, x.dtype, max_lora_rank or most, shares)
    return out


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


def check(
    y: Tensor,
    x: Tensor,
    runs: Sequence[tuple[int, int, int]],
    adapters: Sequence[Adapter],
    widths: tuple[int, ...],
) -> None:
    """Compare every run by itself with float64, and what no run covers with what it was."""
    out = apply(y, x, runs, adapters, widths)
    untouched = torch.ones(y.shape[0], dtype=torch.bool)
    for slot, first, end in runs:
        untouched[first:end] = False
        wanted = adapters[slot].reference(y[first:end], x[first:end])
        assert error(out[first:end], wanted) <= GATES[x.dtype], (slot, first, end)
        columns = 0  # a small module must not hide behind a large one
        for width in widths:
            own = slice(columns, columns + width)
            assert error(out[first:end, own], wanted[:, own]) <= GATES[x.dtype], (slot, width)
            columns += width
    assert torch.equal(out[untouched], y[untouched])
