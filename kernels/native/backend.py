"""The functions of a forward pass on a CPU, by the C functions of kernels.native.

Each runs at once, or is recorded in a program to be run later. Pages are copied and tokens are
sampled as torch does it, but for draws from a whole vocabulary.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.exponent_coding import encode_panels
from kernels.native.gumbel_argmax import gumbel_argmax_native
from kernels.native.huge_pages import HugePages, populate
from kernels.native.ops import (
    ArgmaxOp,
    AttentionOp,
    GateOp,
    LinearOp,
    LoraOp,
    NormOp,
    RopeOp,
    TakeOp,
)
from kernels.native.packing import move_panels, pack_panels
from kernels.native.program import Program, RecordedProgram, Step, ThreadPool
from kernels.sampling import RowSampling, sample_rows
from kernels.torch_backend import CpuKernels

_POPULATED = 2**26  # bytes; a smaller pool is taken unnoticed


@dataclass(frozen=True, slots=True)
class NativeLora:
    """What the LoRA of one fused linear needs: see `LoraOp`."""

    step: Step
    table: Tensor  # [slots, fields] int64
    module_widths: Tensor  # [modules] int64
    max_rank: int  # of all modules of a slot together
    dtype: torch.dtype  # of A and B in all slots


class NativeKernels(CpuKernels):
    """See `kernels.interface.Kernels`.

    While a program is being recorded, tensors have its number of rows and hold nothing yet, and a
    step that is passed along is not looked at.
    """

    uses_pointer_tables = True
    uses_torch_threads = False

    def __init__(self, thread_pool: ThreadPool) -> None:
        self.thread_pool = thread_pool
        self.products = thread_pool.library.products
        self._recorded: RecordedProgram | None = None
        self._memory = HugePages()

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @contextmanager
    def recording(self, program: RecordedProgram) -> Iterator[None]:
        """Record what is asked for in a program instead of doing it."""
        assert self._recorded is None, "one program at a time"
        self._recorded = program
        try:
            yield
        finally:
            self._recorded = None

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        packed = pack_panels(weight, bias)
        coded = encode_panels(packed, self.thread_pool, self._memory)
        return coded or move_panels(packed, self._memory)

    def empty_pool(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        pool = HugePages().empty(shape, dtype)
        if pool.nbytes >= _POPULATED:
            populate(pool)
        return pool

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert self._recorded is None or x.dtype == torch.float32, "a conversion is not recorded"
        x = x.float().contiguous()
        width = x.shape[1]
        total = self._out("total", x.shape[0], (width,), torch.float32)
        out = self._out("normed", x.shape[0], (width,), weight.dtype)
        op = NormOp(
            _at(x), _at(residual), _at(weight), _at(total), _at(out), width, _is_bf16(weight), eps
        )
        self._do("add_rms_norm", op, x.shape[0], (x, residual, weight, total, out))
        return out, total

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert x.dtype == weight.dtype, f"{x.dtype} rows for {weight.dtype} weights"
        assert x.stride(1) == 1, "the inputs of a row must be contiguous"
        assert weight.layout == "panels", f"{weight.layout} is for torch"
        y = self._out("linear", x.shape[0], (weight.out_features,), torch.float32)
        code: tuple[Tensor | None, ...] = (None, None, None)
        if weight.code is not None:
            code = weight.code.tables, weight.code.outliers, weight.code.num_outliers
        op = LinearOp(
            _at(x),
            _at(weight.data),
            _at(weight.bias),
            _at(y),
            *map(_at, code),
            0 if weight.code is None else weight.code.outliers.shape[1],
            x.stride(0),
            y.stride(0),
            weight.in_features,
            weight.out_features,
            _is_bf16(x),
        )
        self._do("linear", op, x.shape[0], (x, weight.data, weight.bias, y, *code))
        return y

    def partial_linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return self.linear(x, weight)

    def lora_apply(self, y: Tensor, x: Tensor, rows: NativeLora) -> None:  # type: ignore[override]
        inner = self._out("inner", x.shape[0], (rows.max_rank,), torch.float32)
        op = LoraOp(
            _at(x),
            _at(y),
            _at(rows.table),
            _at(rows.module_widths),
            x.stride(0),
            y.stride(0),
            x.shape[1],
            rows.module_widths.shape[0],
            _is_bf16(x),
            rows.dtype == torch.bfloat16,
            _at(inner),
            inner.stride(0),
        )
        tensors = (x, y, rows.table, rows.module_widths, inner)
        self._do("lora_shrink", op, rows.step, tensors)
        self._do("lora_expand", op, rows.step, tensors)

    def rope_and_write(  # type: ignore[override]
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        rows: Step,
        k_pages: Tensor,
        v_pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        _, num_kv_heads, page_size, head_dim = k_pages.shape
        dtype = k_pages.dtype
        q = self._out("q", qkv.shape[0], (num_heads, head_dim), dtype)
        op = RopeOp(
            *map(_at, (qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, q)),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            _is_bf16(q),
            eps,
        )
        tensors = (qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, q)
        self._do("rope_and_write", op, rows, tensors)
        return q

    def paged_attention(  # type: ignore[override]
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Step, scale: float
    ) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        _, num_kv_heads, page_size, _ = k_pages.shape
        out = self._out("attended", num_rows, (num_heads, head_dim), q.dtype)
        op = AttentionOp(
            *map(_at, (q, k_pages, v_pages, out)),
            q.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            _is_bf16(q),
            scale,
        )
        self._do("paged_attention", op, rows, (q, k_pages, v_pages, out))
        return out

    def silu_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._out("activated", num_rows, (width,), dtype)
        op = GateOp(_at(gate_up), _at(out), width, dtype == torch.bfloat16)
        self._do("silu_and_mul", op, num_rows, (gate_up, out))
        return out

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        num_rows, width = logits.shape
        values = self._out("argmax", num_rows, (), torch.float32)
        ids = self._out("argmax", num_rows, (), torch.int64)
        op = ArgmaxOp(*map(_at, (logits, values, ids)), width)
        # Where no recorded program has them awake, to wake the other threads would take longer.
        self._do("argmax", op, num_rows, (logits, values, ids), alone=True)
        return values, ids

    def keep_allowed(self, logits: Tensor, allowed: npt.NDArray[np.bool_]) -> None:
        assert logits.is_contiguous() and logits.dtype == torch.float32, "a row of logits"
        assert allowed.flags.c_contiguous and allowed.shape == logits.shape, "a byte for each token"
        self.thread_pool.library.keep_allowed(
            logits.data_ptr(), allowed.ctypes.data, logits.shape[0]
        )

    def sample_rows(self, logits: Tensor, draws: Sequence[RowSampling]) -> Tensor:
        argmax = functools.partial(gumbel_argmax_native, library=self.thread_pool.library)
        return sample_rows(logits, draws, argmax)

    def _out(self, name: str, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return where an op may write."""
        if self._recorded is not None:
            assert num_rows == self._recorded.num_rows, "what is recorded has the program's rows"
            return self._recorded.buffer(name, shape, dtype)
        return torch.empty((num_rows, *shape), dtype=dtype)

    def take_samples(self, x: Tensor) -> Tensor:
        """Record that the sampled rows of x [T, H] float32 are taken: [S, H]."""
        assert self._recorded is not None, "only in a recorded program"
        self._recorded.go_on_with_samples()
        out = self._recorded.buffer(f"samples of {x.data_ptr()}", x.shape[1:], x.dtype)
        op = TakeOp(_at(x), _at(out), x.shape[1])
        self._do("take_rows", op, 0, (x, out))
        return out

    def _do(
        self,
        name: str,
        op: ctypes.Structure,
        step: Step | int,
        tensors: Sequence[Tensor | None],
        *,
        alone: bool = False,
    ) -> None:
        """Run an op at once on a step, or on so many rows, or record it."""
        function = self.thread_pool.library.op(name)
        if self._recorded is not None:
            self._recorded.add(function, op, tensors)
            return
        program = Program()
        program.add(function, op, tensors)
        self.thread_pool.run(program, step if isinstance(step, Step) else Step(step), alone=alone)


def _at(tensor: Tensor | None) -> int | None:
    """Return where a tensor lies, None for none."""
    return None if tensor is None else tensor.data_ptr()


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16
