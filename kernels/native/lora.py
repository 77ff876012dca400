"""The LoRAs of linears, by the C functions of kernels.native.

Shapes: T rows, K inputs, N outputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.lora import WriteCodes
from kernels.native.op_runner import OpRunner, at, is_bf16
from kernels.native.ops import (
    LinearDeltaOp,
    LinearOp,
    LoraOp,
    QuantizedLinearOp,
    lora_item,
)
from kernels.native.packing import PANEL
from kernels.native.program import Step


@dataclass(frozen=True, slots=True)
class NativeLora:
    """What the LoRA of one fused linear, or of one of experts, needs: see `LoraOp`."""

    step: Step
    table: Tensor  # [slots, fields] int64; of E experts [slots, E, fields]
    module_widths: Tensor  # [modules] int64
    max_rank: int  # of all modules of a slot, or of a slot's expert, together
    dtype: torch.dtype  # of A and B in all slots

    @property
    def is_of_panels(self) -> bool:
        """Whether a linear can add it to its outputs itself."""
        return self.dtype == torch.int8 and not (self.module_widths % PANEL).any()


class NativeLoras(OpRunner):
    """See `kernels.interface.Kernels`."""

    @property
    def write_lora_codes(self) -> WriteCodes | None:
        library = self.thread_pool.library
        return WriteCodes(
            functools.partial(_write_codes, library.lora_codes_of_a),
            functools.partial(_write_codes, library.lora_codes_of_b),
        )

    def lora_apply(self, y: Tensor, x: Tensor, rows: NativeLora) -> None:  # type: ignore[override]
        op, tensors = self._lora_op(y, x, rows, "inner")
        self._do("lora_shrink", op, rows.step, tensors)
        self._do("lora_expand", op, rows.step, tensors)

    def _shrink(
        self, x: Tensor, rows: NativeLora, linear: LinearOp | QuantizedLinearOp
    ) -> tuple[LinearDeltaOp, list[Tensor | None]]:
        """Compute A x, and return what a linear adds then, and the tensors that it points into."""
        op, tensors = self._lora_op(None, x, rows, "inner")
        op.codes_for_linear = self._has_same_codes(op, linear)
        self._do("lora_shrink", op, rows.step, tensors)
        num_bytes = self.thread_pool.library.delta_row_bytes(op)
        inner = self._out("inner in int8", x.shape[0], (num_bytes,), torch.uint8)
        return LinearDeltaOp(op, at(inner)), [*tensors, inner]

    def _has_same_codes(self, lora: LoraOp, linear: LinearOp | QuantizedLinearOp) -> bool:
        """Return whether a linear's rows become the int8 that those of a LoRA do."""
        if not isinstance(linear, QuantizedLinearOp) or not linear.scales or linear.largest:
            return False
        library = self.thread_pool.library
        num_bytes = library.coded_row_bytes(linear)
        return bool(linear.is_rotated) and num_bytes == library.lora_coded_row_bytes(lora)

    def _lora_op(
        self, y: Tensor | None, x: Tensor, rows: NativeLora, name: str
    ) -> tuple[LoraOp, tuple[Tensor | None, ...]]:
        """Return the op of a LoRA and the tensors that it points into.

        Args:
            y: [T, N] float32; None: a linear adds to its own outputs.
            x: [T, K].
            rows: the slots.
            name: of the memory for A x.
        """
        inner = self._out(name, x.shape[0], (rows.max_rank,), torch.float32)
        op = LoraOp(
            *map(at, (x, y, rows.table, rows.module_widths)),
            x.stride(0),
            0 if y is None else y.stride(0),
            x.shape[1],
            rows.module_widths.shape[0],
            is_bf16(x),
            lora_item(rows.dtype),
            at(inner),
            inner.stride(0),
        )
        tensors = x, y, rows.table, rows.module_widths, inner
        if rows.dtype != torch.int8:
            return op, tensors
        num_bytes = self.thread_pool.library.lora_coded_row_bytes(op)
        coded = self._out("coded for LoRA", x.shape[0], (num_bytes,), torch.uint8)
        op.coded = at(coded)
        return op, (*tensors, coded)


def _write_codes(function: Callable[..., None], rows: Tensor, codes: Tensor) -> Tensor:
    """Return what the function says 1 of each row stands for."""
    assert rows.is_contiguous() and codes.is_contiguous(), "rows, one behind the other"
    scales = torch.empty(len(rows), dtype=torch.float32)
    function(at(rows), *rows.shape, is_bf16(rows), at(codes), at(scales))
    return scales
