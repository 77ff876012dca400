"""The functions of a forward pass on a CPU, by the C functions of kernels.native.

Each runs at once, or is recorded in a program to be run later. Pages are copied and tokens are
sampled as torch does it, but for draws from a whole vocabulary.
"""

import functools
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention_batch import RowArrays
from kernels.elementwise import result_dtype
from kernels.int8_kv import SCALE_BYTES
from kernels.native.experts import NativeExperts
from kernels.native.gates import NativeGates
from kernels.native.gumbel_argmax import gumbel_argmax_native
from kernels.native.huge_pages import HugePages, populate
from kernels.native.library import LookUp, RowLayout
from kernels.native.op_runner import at, is_bf16
from kernels.native.ops import (
    ArgmaxOp,
    AttentionOp,
    GateHeadsOp,
    NormOp,
    RopeOp,
    TakeOp,
    WideNormOp,
)
from kernels.native.program import Step, ThreadPool
from kernels.native.recurrent import NativeRecurrent
from kernels.quantized import QuantizedLinears
from kernels.sampling import RowDraws, sample_rows

_POPULATED = 2**26  # bytes; a smaller pool is taken unnoticed


def _check_pages(pages: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Make sure that rows of K or V lie in their pages as the C code expects."""
    width = head_dim + SCALE_BYTES if pages.dtype == torch.int8 else head_dim
    assert pages.dtype in (dtype, torch.int8), f"pages of {pages.dtype} beside Q of {dtype}"
    assert pages.shape[3] == width and pages.is_contiguous(), "whole rows, one behind the other"


def _check_heads(qkv: Tensor) -> None:
    """Make sure that the heads of a row [T, heads, D] lie as the C code expects."""
    assert qkv.dtype == torch.float32, "as products are"
    assert qkv.stride()[1:] == (qkv.shape[2], 1), "the heads of a row are contiguous"


def _pages(table: Sequence[int]) -> "array[int]":
    """Return pages as int32, themselves if they are."""
    if isinstance(table, array) and table.typecode == "i":
        return table
    return array("i", table)


class NativeKernels(NativeExperts, NativeGates, NativeRecurrent):
    """See `kernels.interface.Kernels`."""

    uses_pointer_tables = True
    uses_torch_threads = False
    reads_past_contexts = False

    def __init__(self, thread_pool: ThreadPool) -> None:
        super().__init__(thread_pool)
        self.products = thread_pool.library.products

    @property
    def quantized(self) -> QuantizedLinears:
        return self

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def empty_pool(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        pool = HugePages().empty(shape, dtype)
        if pool.nbytes >= _POPULATED:
            populate(pool)
        return pool

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        is_ready = x.dtype == torch.float32 and x.is_contiguous()
        assert is_ready or self._recorded is None, "a conversion is not recorded"
        x = x.float().contiguous()
        width = x.shape[1]
        total = self._out("total", x.shape[0], (width,), torch.float32)
        out = self._out("normed", x.shape[0], (width,), result_dtype(weight, dtype))
        self._norm(x, residual, weight, total, out, eps)
        return out, total

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous(), "as products are"
        out = self._out("normed block", x.shape[0], (x.shape[1],), torch.float32)
        self._norm(x, None, weight, None, out, eps)
        return out

    def _norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        total: Tensor | None,
        out: Tensor,
        eps: float,
    ) -> None:
        tensors = (x, residual, weight, total, out)
        is_weight_bf16 = weight is not None and is_bf16(weight)
        op = NormOp(*map(at, tensors), x.shape[1], is_bf16(out), is_weight_bf16, eps)
        self._do("add_rms_norm", op, x.shape[0], tensors)

    def square_sums(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, counts_kv: bool
    ) -> Tensor:
        _check_heads(qkv)
        sums = self._out("square sums", qkv.shape[0], (2,), torch.float32)
        heads = qkv.stride(0), num_heads, num_kv_heads, qkv.shape[2], counts_kv
        op = WideNormOp(at(qkv), at(sums), None, None, *heads, 0, 0, 0, 0.0)
        self._do("square_sums", op, qkv.shape[0], (qkv, sums))
        return sums

    def wide_norm(
        self,
        qkv: Tensor,
        sums: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        widths: tuple[int, int],
        eps: float,
    ) -> None:
        _check_heads(qkv)
        assert q_norm.dtype == k_norm.dtype, "norms of one kind"
        tensors, head_dim = (qkv, sums, q_norm, k_norm), qkv.shape[2]
        heads = qkv.stride(0), len(q_norm) // head_dim, len(k_norm) // head_dim, head_dim, 0
        op = WideNormOp(*map(at, tensors), *heads, *widths, is_bf16(q_norm), eps)
        self._do("wide_norm", op, qkv.shape[0], tensors)

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
        dtype: torch.dtype,
    ) -> Tensor:
        _, num_kv_heads, page_size, _ = k_pages.shape
        head_dim = qkv.shape[2]
        _check_pages(k_pages, head_dim, dtype)
        _check_heads(qkv)
        q = self._out("q", qkv.shape[0], (num_heads, head_dim), dtype)
        op = RopeOp(
            *map(at, (qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, q)),
            qkv.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            2 * cos.shape[1],
            page_size,
            is_bf16(q),
            q_norm is not None and is_bf16(q_norm),
            k_pages.dtype == torch.int8,
            eps,
        )
        tensors = (qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, q)
        self._do("rope_and_write", op, rows, tensors)
        return q

    def paged_attention(  # type: ignore[override]
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: Step,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        _, num_kv_heads, page_size, _ = k_pages.shape
        _check_pages(k_pages, head_dim, q.dtype)
        out = self._out("attended", num_rows, (num_heads, head_dim), q.dtype)
        assert sinks is None or sinks.shape == (num_heads,), "a sink for each query head"
        assert sinks is None or sinks.dtype == torch.float32, "sinks are float32"
        op = AttentionOp(
            *map(at, (q, k_pages, v_pages, out)),
            q.stride(0),
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            is_bf16(q),
            window or 0,
            k_pages.dtype == torch.int8,
            scale,
            at(sinks),
        )
        self._do("paged_attention", op, rows, (q, k_pages, v_pages, sinks, out))
        return out

    def gate_heads(self, x: Tensor, gates: Tensor) -> None:
        assert x.is_contiguous() and gates.dtype == torch.float32, "attention's, and a product's"
        width = x[0].numel()
        assert gates.shape == (x.shape[0], width) and gates.stride(1) == 1, "one for each feature"
        op = GateHeadsOp(at(x), at(gates), gates.stride(0), width, is_bf16(x))
        self._do("gate_heads", op, x.shape[0], (x, gates))

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        assert logits.stride(1) == 1, "a row of logits is in one piece"
        num_rows, width = logits.shape
        values = self._out("argmax", num_rows, (), torch.float32)
        ids = self._out("argmax", num_rows, (), torch.int64)
        op = ArgmaxOp(*map(at, (logits, values, ids)), logits.stride(0), width)
        # Where no recorded program has them awake, to wake the other threads would take longer.
        self._do("argmax", op, num_rows, (logits, values, ids), alone=True)
        return values, ids

    def lay_out_rows(
        self,
        arrays: RowArrays,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
    ) -> None:
        """Fill the arrays of a step; see `AttentionBatch.build`."""
        starts, lengths = array("q", query_starts), array("q", context_lens)
        tables = [_pages(table) for table in page_tables]
        addresses = array("Q", [table.buffer_info()[0] for table in tables])
        self.thread_pool.library.lay_out_rows(
            RowLayout(
                *(given.buffer_info()[0] for given in (starts, lengths, addresses)),
                *arrays.page_table.shape,
                page_size,
                arrays.page_table.ctypes.data,
                arrays.kv_loc.ctypes.data,
                arrays.positions.ctypes.data,
                arrays.sequences.ctypes.data,
            )
        )

    def look_up(self, token_ids: Tensor, table: Tensor, scale: float, out: Tensor) -> None:
        """Write rows of `table` [V, H], float32 or bfloat16, times `scale` into `out` [T, H].

        Args:
            token_ids: [T] int64, rows of the table.
            table: of embeddings.
            scale: what they are multiplied by, in float32.
            out: float32.
        """
        num_rows, width = out.shape
        assert table.dtype in (torch.float32, torch.bfloat16), f"a table of {table.dtype}"
        assert out.dtype == torch.float32 and table.shape[1] == width, "rows of the table in floats"
        assert table.is_contiguous() and out.is_contiguous(), "whole rows, one behind the other"
        assert token_ids.shape == (num_rows,) and token_ids.dtype == torch.int64, "one for each row"
        tensors = at(out), at(token_ids), at(table)
        asked = LookUp(*tensors, num_rows, len(table), width, is_bf16(table), scale)
        is_bad = self.thread_pool.library.look_up(asked)
        assert not is_bad, f"no rows of a table of {len(table)}"

    def keep_allowed(
        self, logits: Tensor, rows: Sequence[int], allowed: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        assert logits.stride(1) == 1 and logits.dtype == torch.float32, "rows of logits"
        width = logits.shape[1]
        for row, bits in zip(rows, allowed, strict=True):
            assert bits.flags.c_contiguous and len(bits) == -(-width // 8), "all bits"
            self.thread_pool.library.keep_allowed(logits[row].data_ptr(), bits.ctypes.data, width)

    def sample_rows(self, logits: Tensor, draws: RowDraws) -> Tensor:
        argmax = functools.partial(gumbel_argmax_native, library=self.thread_pool.library)
        return sample_rows(logits, draws.draws, draws.positions, argmax)

    def take_samples(self, x: Tensor) -> Tensor:
        """Record that the sampled rows of x [T, H] float32 are taken: [S, H]."""
        assert self._recorded is not None, "only in a recorded program"
        self._recorded.go_on_with_samples()
        out = self._recorded.buffer(f"samples of {x.data_ptr()}", x.shape[1:], x.dtype)
        op = TakeOp(at(x), at(out), x.shape[1])
        self._do("take_rows", op, 0, (x, out))
        return out
