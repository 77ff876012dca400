"""Adapters of a fused linear as the C library has them, and what comes of their two ops."""

import ctypes
import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.lora import CODED_INPUTS, CODED_RANKS, join_blocks
from kernels.native.library import Library
from kernels.native.lora import NativeLora
from kernels.native.ops import LoraOp, lora_item
from kernels.native.program import Program, Step, ThreadPool
from kernels.quantized import quantize_rows, rotate

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
POISON = 1e30
QUAD = CODED_INPUTS
assert QUAD == CODED_RANKS


@dataclass(frozen=True)
class Adapter:
    """One adapter of a fused linear; None where it has no LoRA of a module."""

    a: Tensor  # [R, K]
    parts: list[Tensor | None]  # B [width, ranks] of each module
    gain: Tensor | None = None
    shift: Tensor | None = None
    scales: Tensor | None = None  # [R] float32, of A and B in int8

    def to(self, dtype: torch.dtype) -> "Adapter":
        """Return it with A and B in a dtype, int8 with scales that are nothing but like them."""

        def to(x: Tensor) -> Tensor:
            return (x * 127 / x.abs().max()).round().to(INT8) if dtype == INT8 else x.to(dtype)

        parts = [None if part is None else to(part) for part in self.parts]
        scales = randn(len(self.a), seed=9) * 1e-4 if dtype == INT8 else None
        return Adapter(to(self.a), parts, self.gain, self.shift, scales)


def panels(x: Tensor, width: int) -> Tensor:
    """Return [rows, columns] in int8 as the C code reads it, in one row: panels of `width` rows.

    Rows are lora_ranks of A or outputs of B, columns the inputs or lora_ranks.
    """
    x = F.pad(x, (0, -x.shape[1] % QUAD))
    return torch.cat(
        [panel.view(len(panel), -1, QUAD).transpose(0, 1).flatten() for panel in x.split(width)]
    )


def guarded(codes: Tensor) -> Tensor:
    """Return a copy [...] of int8 behind whose end no memory may be read."""
    num_bytes = -(-codes.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = torch.frombuffer(mmap.mmap(-1, num_bytes + mmap.PAGESIZE), dtype=INT8)
    end = ctypes.c_void_p(whole.data_ptr() + num_bytes)
    assert ctypes.CDLL(None).mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[num_bytes - codes.numel() : num_bytes].view(codes.shape).copy_(codes)


def poison(dtype: torch.dtype) -> float:
    """Return what no result may hold."""
    return -128 if dtype == INT8 else torch.nan


def amid_poison(x: Tensor, after: int) -> Tensor:
    """Return a copy [elements] that stands so many elements behind the begin of its memory."""
    around = torch.full((len(x) + 80,), poison(x.dtype), dtype=x.dtype)
    return around[after : after + len(x)].copy_(x)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_adapter(k: int, widths: list[int], ranks: list[int], seed: int, *, dora: bool) -> Adapter:
    """Return an adapter with these ranks; 0 is a module that it leaves alone."""
    n = sum(widths)
    parts = [randn(w, r, seed=seed) if r else None for w, r in zip(widths, ranks, strict=True)]
    gain, shift = (randn(n, seed=seed + 1), randn(n, seed=seed + 2)) if dora else (None, None)
    return Adapter(randn(sum(ranks), k, seed=seed + 3) / k**0.5, parts, gain, shift)


class Linear:
    """The two ops of a fused linear whose slots hold these adapters."""

    def __init__(
        self,
        library: Library,
        k: int,
        widths: list[int],
        adapters: list[Adapter | None],
        b_after: int = 0,
    ) -> None:
        """Lay the adapters out, each B, and A in int8, so many elements after its natural place.

        If that is nowhere else, no memory may be read behind A and B in int8.
        """
        self.k, self.widths, self.adapters = k, widths, adapters
        (self._dtype,) = {one.a.dtype for one in adapters if one is not None}
        self._thread_pools = {threads: ThreadPool(library, threads) for threads in (1, 2, 3)}
        self._library, self._kept = library, []
        self._b_after = b_after
        self._max_rank = max((len(one.a) for one in adapters if one is not None), default=1)
        lines = [self._line(one) for one in adapters]
        self._table, self._widths = torch.tensor(lines), torch.tensor(widths)

    def _line(self, adapter: Adapter | None) -> list[int]:
        line = [0] * (5 + 3 * len(self.widths))
        if adapter is None:
            return [0, *(8 for _ in line[1:])]  # without an A, the rest means nothing
        parts = [part for part in adapter.parts if part is not None]
        laid_out = (
            [panels(part, 32).unsqueeze(1) for part in parts] if self._dtype == INT8 else parts
        )
        b, blocks = join_blocks([(0, part) for part in laid_out])
        a = panels(adapter.a, 16) if self._dtype == INT8 else adapter.a
        if self._b_after > 0:
            b = amid_poison(b, self._b_after)
            a = amid_poison(a, self._b_after) if self._dtype == INT8 else a
        elif self._dtype == INT8:
            a, b = guarded(a), guarded(b)
        else:
            b = amid_poison(b, 0)
        self._kept.append((adapter, a, b))
        others = adapter.gain, adapter.shift, adapter.scales
        line[:5] = (
            a.data_ptr(),
            len(adapter.a),
            *(0 if one is None else one.data_ptr() for one in others),
        )
        present = [index for index, part in enumerate(adapter.parts) if part is not None]
        first = 0
        for index, part, element in zip(present, parts, blocks[:, 4].tolist(), strict=True):
            address = b.data_ptr() + b.itemsize * element
            line[5 + 3 * index : 8 + 3 * index] = address, first, part.shape[1]
            first += part.shape[1]
        return line

    def rows(self, num_rows: int, runs: list[tuple[int, int, int]]) -> NativeLora:
        """Return what backends want of a step with these runs (slot, first row, end)."""
        step = Step(num_rows, runs=runs)
        return NativeLora(step, self._table, self._widths, self._max_rank, self._dtype)

    def apply(
        self, y: Tensor, x: Tensor, runs: list[tuple[int, int, int]], num_threads: int = 1
    ) -> Tensor:
        """Return y after both ops; what lies around x, y and the inner rows is no number."""
        rows, stride = len(x), self.k + 24
        wide_x = torch.full((rows, stride), torch.nan, dtype=x.dtype)
        wide_x[:, : self.k] = x
        wide_y = torch.full((rows + 2, y.shape[1]), POISON)
        wide_y[1:-1] = y
        inner = torch.full((rows, self._max_rank + 5), torch.nan)
        op = LoraOp(
            x=wide_x.data_ptr(),
            y=wide_y[1:].data_ptr(),
            table=self._table.data_ptr(),
            module_widths=self._widths.data_ptr(),
            x_stride=stride,
            y_stride=y.shape[1],
            num_inputs=self.k,
            num_modules=len(self.widths),
            is_bf16=x.dtype == BF16,
            item=lora_item(self._dtype),
            inner=inner.data_ptr(),
            inner_stride=inner.shape[1],
        )
        coded = torch.empty(rows, self._library.lora_coded_row_bytes(op), dtype=torch.uint8)
        op.coded = coded.data_ptr()
        program = Program()
        for name in ("lora_shrink", "lora_expand"):
            program.add(self._library.op(name), op, [wide_x, wide_y, inner, coded])
        self._thread_pools[num_threads].run(program, Step(rows, runs=runs))
        assert (wide_y[0] == POISON).all() and (wide_y[-1] == POISON).all()
        return wide_y[1:-1]

    def expected(self, y: Tensor, x: Tensor, runs: list[tuple[int, int, int]]) -> Tensor:
        """Return what `apply` would without rounding, in float64, but that of codes."""
        wanted = y.double()
        for slot, start, stop in runs:
            adapter, rows = self.adapters[slot], slice(start, stop)
            if adapter is None:
                continue
            for factor in [] if adapter.gain is None else [adapter.gain]:
                wanted[rows] *= factor.double()
            for term in [] if adapter.shift is None else [adapter.shift]:
                wanted[rows] += term.double()
            inner = self._inner(x[rows], adapter)
            rank = output = 0
            for part, width in zip(adapter.parts, self.widths, strict=True):
                if part is not None:
                    u = inner[:, rank : rank + part.shape[1]]
                    wanted[rows, output : output + width] += self._outer(u, part)
                    rank += part.shape[1]
                output += width
        return wanted

    def _inner(self, x: Tensor, adapter: Adapter) -> Tensor:
        """Return A x."""
        if adapter.scales is None:
            return x.double() @ adapter.a.double().T
        codes, scales = quantize_rows(rotate(x))
        sums = (codes.int() @ adapter.a.int().T).float()
        return sums * scales.unsqueeze(1) * adapter.scales

    def _outer(self, u: Tensor, b: Tensor) -> Tensor:
        """Return B u for a module's B [width, ranks]."""
        if b.dtype != INT8:
            return u @ b.double().T
        codes, scales = quantize_rows(u)
        return (codes.int() @ b.int().T).float() * scales.unsqueeze(1)
