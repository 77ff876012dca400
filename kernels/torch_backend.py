"""The functions of a forward pass on a CPU, by torch alone."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention import paged_attention, write_kv
from kernels.attention_batch import AttentionBatch
from kernels.elementwise import (
    GatedActivation,
    add_rms_norm,
    apply_rope,
    gate_heads,
    gelu_tanh_and_mul,
    rms_norm,
    silu_and_mul,
    square_sums,
    swigluoai_and_mul,
    wide_norm,
)
from kernels.experts import (
    ExpertLoraRun,
    ExpertsWeight,
    RoutedRows,
    Routing,
    grouped_linear,
    grouped_lora_apply,
    permute,
    prepare_experts,
    route,
    unpermute,
)
from kernels.interface import Numbers
from kernels.linear import LinearWeight, linear, prepare_linear
from kernels.lora import LoraSegment, WriteCodes, lora_apply
from kernels.page_copy import clear_pages, fork_pages, restore_pages, save_pages
from kernels.quantized import QuantizedLinears
from kernels.recurrent.cpu_backend import CpuRecurrent
from kernels.sampling import RowDraws, RowSampling, sample_rows, token_logprobs


@dataclass(frozen=True, slots=True)
class FinishedReadback:
    """See `kernels.interface.Readback`: what a CPU was asked for is done."""

    tensors: Sequence[Tensor]

    @property
    def is_ready(self) -> bool:
        return True

    def read(self) -> Sequence[Tensor]:
        return self.tensors


class CpuKernels(CpuRecurrent):
    """See `kernels.interface.Kernels`."""

    pins_memory = False
    uses_pointer_tables = False
    uses_torch_threads = True
    reads_past_contexts = True
    products = "torch"

    @property
    def quantized(self) -> QuantizedLinears | None:
        return None

    @property
    def write_lora_codes(self) -> WriteCodes | None:
        return None

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # deltas are computed in it: widened once, not at every step

    def loading(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def empty_pool(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def send(self, numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=dtype)

    def start_readback(self, tensors: Sequence[Tensor], device: torch.device) -> FinishedReadback:
        return FinishedReadback(tensors)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, x.dtype)

    def square_sums(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, counts_kv: bool
    ) -> Tensor:
        return square_sums(qkv, num_heads, num_kv_heads, counts_kv=counts_kv)

    def wide_norm(
        self,
        qkv: Tensor,
        sums: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        widths: tuple[int, int],
        eps: float,
    ) -> None:
        wide_norm(qkv, sums, q_norm, k_norm, widths, eps)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        return prepare_linear(weight, bias)

    def linear(
        self, x: Tensor, weight: LinearWeight, lora: Sequence[LoraSegment] | None = None
    ) -> Tensor:
        y = linear(x, weight)
        if lora is not None:
            lora_apply(y, x, lora)
        return y

    def partial_linear(
        self, x: Tensor, weight: LinearWeight, lora: Sequence[LoraSegment] | None = None
    ) -> Tensor:
        return self.linear(x, weight, lora)

    def gated_linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        activation: GatedActivation,
        lora: Sequence[LoraSegment] | None = None,
    ) -> Tensor:
        gate = self.gelu_tanh_and_mul if activation == "gelu_tanh" else self.silu_and_mul
        return gate(self.linear(x, weight, lora), x.dtype)

    def lora_apply(self, y: Tensor, x: Tensor, rows: Sequence[LoraSegment]) -> None:
        lora_apply(y, x, rows)

    def prepare_experts(self, weight: Tensor, bias: Tensor | None = None) -> ExpertsWeight:
        return prepare_experts(weight, bias)

    def route(self, logits: Tensor, routing: Routing) -> RoutedRows:
        return route(logits, routing)

    def permute(self, x: Tensor, routed: RoutedRows) -> Tensor:
        return permute(x, routed)

    def grouped_linear(self, x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
        return grouped_linear(x, weight, routed)

    def grouped_lora_apply(
        self, y: Tensor, x: Tensor, rows: Sequence[ExpertLoraRun], routed: RoutedRows
    ) -> None:
        grouped_lora_apply(y, x, rows, routed)

    def unpermute(
        self,
        y: Tensor,
        routed: RoutedRows,
        start: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        return unpermute(y, routed, start, gates)

    def rope_and_write(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        rows: AttentionBatch,
        k_pages: Tensor,
        v_pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        num_kv_heads = k_pages.shape[1]
        q, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, eps, dtype), rms_norm(k, k_norm, eps, dtype)
        q, k = apply_rope(q, k, cos, sin, rows.positions)
        write_kv(k, v, k_pages, v_pages, rows.kv_loc)
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: AttentionBatch,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(q, k_pages, v_pages, rows, scale, window, sinks)

    def gate_heads(self, x: Tensor, gates: Tensor) -> None:
        gate_heads(x, gates)

    def silu_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        return silu_and_mul(gate_up).to(dtype)

    def gelu_tanh_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        return gelu_tanh_and_mul(gate_up).to(dtype)

    def swigluoai_and_mul(
        self, gate_up: Tensor, dtype: torch.dtype, alpha: float, limit: float
    ) -> Tensor:
        return swigluoai_and_mul(gate_up, alpha, limit).to(dtype)

    def save_pages(
        self, pool: Tensor, sources: Sequence[int], host: Tensor, targets: Sequence[int]
    ) -> None:
        save_pages(pool, sources, host, targets)

    def restore_pages(
        self, host: Tensor, sources: Sequence[int], pool: Tensor, targets: Sequence[int]
    ) -> None:
        restore_pages(host, sources, pool, targets)

    def save_states(self, page: Tensor, host: Tensor) -> None:
        host.copy_(page)

    def restore_states(self, host: Tensor, page: Tensor) -> None:
        page.copy_(host)

    def fork_pages(
        self,
        pool: Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        num_positions: Sequence[int],
    ) -> None:
        fork_pages(pool, sources, targets, num_positions)

    def clear_pages(self, pool: Tensor, pages: Sequence[int] | Tensor) -> None:
        clear_pages(pool, pages)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = logits.max(dim=-1)
        return values, ids

    def where_finite(self, values: Tensor, token_ids: Tensor, other: int) -> Tensor:
        # By NumPy: a step waits for this, and torch takes longer to begin.
        return torch.from_numpy(np.where(np.isfinite(values.numpy()), token_ids.numpy(), other))

    def keep_allowed(
        self, logits: Tensor, rows: Sequence[int], allowed: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        for row, bits in zip(rows, allowed, strict=True):
            barred = np.unpackbits(~bits, count=logits.shape[1], bitorder="little")
            logits[row].masked_fill_(torch.from_numpy(barred.view(np.bool_)), -torch.inf)

    def send_draws(
        self,
        rows: Sequence[int],
        draws: Sequence[RowSampling],
        positions: Sequence[int],
        device: torch.device,
    ) -> RowDraws:
        return RowDraws(torch.tensor(rows, dtype=torch.int64), draws, positions)

    def sample_rows(self, logits: Tensor, draws: RowDraws) -> Tensor:
        return sample_rows(logits, draws.draws, draws.positions)

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return token_logprobs(logits, rows, token_ids, counts)
