"""The functions of a forward pass on a GPU, by the kernels beside this file.

Matrix products are cuBLAS's, unless a row's bits must not depend on its batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.elementwise import GatedActivation
from kernels.experts import ExpertsWeight, RoutedRows, Routing
from kernels.gpu.activation import gate_heads, gelu_tanh_and_mul, silu_and_mul, swigluoai_and_mul
from kernels.gpu.async_copy import AsyncReadback, send_numbers
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.attention.paged_prefill import paged_prefill
from kernels.gpu.batch_invariant.linear import batch_invariant_linear, num_tree_parts
from kernels.gpu.batch_metadata import AttentionMetadata, ExpertLoraMetadata, LoraMetadata
from kernels.gpu.copy_stream import CopyStream
from kernels.gpu.experts.grouped_linear import grouped_linear
from kernels.gpu.experts.pair_tiles import cut_pair_tiles
from kernels.gpu.experts.routing import route
from kernels.gpu.experts.unpermute import unpermute
from kernels.gpu.lora.apply import lora_apply, lora_expand, lora_shrink
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.pages import GpuPages
from kernels.gpu.recurrent.backend import GpuRecurrent
from kernels.gpu.rope import rope_and_write
from kernels.gpu.sampling.allowed import keep_allowed
from kernels.gpu.sampling.draws import DrawsSender
from kernels.gpu.sampling.logprobs import token_logprobs
from kernels.gpu.sampling.sampler import argmax, sample
from kernels.gpu.side_stream import SideStream
from kernels.gpu.wide_norm import square_sums, wide_norm
from kernels.interface import Numbers
from kernels.linear import LinearWeight
from kernels.quantized import QuantizedLinears
from kernels.sampling import RowDraws, RowSampling


class GpuKernels(GpuRecurrent, GpuPages):
    """See `kernels.interface.Kernels`."""

    pins_memory = True
    uses_pointer_tables = True
    write_lora_codes = None
    uses_torch_threads = True
    reads_past_contexts = True
    products = "CUDA"

    def __init__(self, deterministic: bool, tp: int = 1) -> None:
        super().__init__()
        self._deterministic = deterministic
        self._tp = tp
        self._side = SideStream()
        self._draws = DrawsSender()
        self._loads = CopyStream()  # not that of pages: these would wait for adapters

    @property
    def quantized(self) -> QuantizedLinears | None:
        return None

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    @contextmanager
    def loading(self, device: torch.device) -> Iterator[None]:
        self._loads.follow_steps(device)
        with self._loads.beside(device):
            yield
        self._loads.finish(device)

    def empty_pool(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def send(self, numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
        return send_numbers(numbers, dtype, device)

    def start_readback(self, tensors: Sequence[Tensor], device: torch.device) -> AsyncReadback:
        return AsyncReadback(tensors, device)

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
        return rms_norm(x, weight, eps)

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
        return LinearWeight(
            weight.contiguous(), bias, weight.shape[1], weight.shape[0], weight.dtype
        )

    def linear(self, x: Tensor, weight: LinearWeight, lora: LoraMetadata | None = None) -> Tensor:
        assert weight.layout == "plain", "other layouts are a CPU's"
        product = batch_invariant_linear if self._deterministic else F.linear
        return self._with_lora(lambda: product(x, weight.data, weight.bias), x, lora)

    def gated_linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        activation: GatedActivation,
        lora: LoraMetadata | None = None,
    ) -> Tensor:
        gate = self.gelu_tanh_and_mul if activation == "gelu_tanh" else self.silu_and_mul
        return gate(self.linear(x, weight, lora), x.dtype)

    def partial_linear(
        self, x: Tensor, weight: LinearWeight, lora: LoraMetadata | None = None
    ) -> Tensor:
        if not self._deterministic:
            return self.linear(x, weight, lora)
        num_parts = max(1, num_tree_parts(weight.in_features * self._tp) // self._tp)
        data, bias = weight.data, weight.bias
        return self._with_lora(
            lambda: batch_invariant_linear(x, data, bias, num_parts, torch.float32), x, lora
        )

    def _with_lora(
        self, product: Callable[[], Tensor], x: Tensor, lora: LoraMetadata | None
    ) -> Tensor:
        """Return a product of x with LoRA added, whose smaller half runs beside the product.

        It is the product that goes to the other stream, where kernels start later after what they
        wait for: by then the smaller half, which starts at once, is done with the SMs that both
        want.
        """
        if lora is None or lora.max_lora_rank == 0 or lora.tiles.shape[0] == 0:
            return product()
        with self._side.beside(x.device):
            y = product()
        planes = lora_shrink(x, lora.tiles, lora.table, lora.max_lora_rank, are_sent=True)
        self._side.lead_steps(x.device)
        lora_expand(y, planes, lora.tiles, lora.table, lora.widths, lora.dtype, lora.shares)
        return y

    def lora_apply(self, y: Tensor, x: Tensor, rows: LoraMetadata) -> None:
        lora_apply(
            y,
            x,
            rows.tiles,
            rows.table,
            rows.widths,
            rows.dtype,
            rows.max_lora_rank,
            rows.shares,
        )

    def prepare_experts(self, weight: Tensor, bias: Tensor | None = None) -> ExpertsWeight:
        num_experts, out_features, in_features = weight.shape
        flat_bias = None if bias is None else bias.flatten()
        linear = self.prepare_linear(weight.flatten(0, 1), flat_bias)
        return ExpertsWeight((linear,), num_experts, in_features, out_features, weight.dtype)

    def route(self, logits: Tensor, routing: Routing) -> RoutedRows:
        return route(logits, routing)

    def permute(self, x: Tensor, routed: RoutedRows) -> Tensor:
        return x.index_select(0, routed.rows)

    def grouped_linear(self, x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
        return grouped_linear(x, weight, routed)

    def grouped_lora_apply(
        self, y: Tensor, x: Tensor, rows: ExpertLoraMetadata, routed: RoutedRows
    ) -> None:
        tiles = cut_pair_tiles(rows.row_slots, routed)
        table = rows.table.flatten(0, 1)
        lora_apply(y, x, tiles, table, rows.widths, rows.dtype, rows.max_lora_rank)

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
        rows: AttentionMetadata,
        k_pages: Tensor,
        v_pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        assert qkv.dtype == k_pages.dtype == dtype, "K and V have the dtype of Q on a GPU"
        return rope_and_write(
            qkv,
            num_heads,
            cos,
            sin,
            rows.positions,
            rows.kv_loc,
            k_pages,
            v_pages,
            q_norm,
            k_norm,
            eps,
        )

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: AttentionMetadata,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(rows.decode_rows):
            paged_decode(
                q,
                k_pages,
                v_pages,
                rows.decode_rows,
                rows.decode_table,
                rows.decode_lens,
                scale,
                out,
                rows.max_splits,
                window or 0,
                sinks,
            )
        if len(rows.prefill_blocks):
            paged_prefill(
                q,
                k_pages,
                v_pages,
                rows.prefill_blocks,
                rows.prefill_table,
                scale,
                out,
                window or 0,
                sinks,
            )
        return out

    def gate_heads(self, x: Tensor, gates: Tensor) -> None:
        gate_heads(x, gates)

    def silu_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        assert gate_up.dtype == dtype, "products on a GPU have the weights' dtype"
        return silu_and_mul(gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        assert gate_up.dtype == dtype, "products on a GPU have the weights' dtype"
        return gelu_tanh_and_mul(gate_up)

    def swigluoai_and_mul(
        self, gate_up: Tensor, dtype: torch.dtype, alpha: float, limit: float
    ) -> Tensor:
        assert gate_up.dtype == dtype, "products on a GPU have the weights' dtype"
        return swigluoai_and_mul(gate_up, alpha, limit)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return argmax(logits)

    def where_finite(self, values: Tensor, token_ids: Tensor, other: int) -> Tensor:
        # A finite number less itself is 0, all others are NaN then.
        return token_ids.masked_fill((values - values).ne(0), other)

    def keep_allowed(
        self, logits: Tensor, rows: Sequence[int], allowed: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        keep_allowed(logits, rows, allowed)

    def send_draws(
        self,
        rows: Sequence[int],
        draws: Sequence[RowSampling],
        positions: Sequence[int],
        device: torch.device,
    ) -> RowDraws:
        return self._draws.send(rows, draws, positions, device)

    def sample_rows(self, logits: Tensor, draws: RowDraws) -> Tensor:
        return sample(logits, *draws.columns)

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        row_ids = send_numbers(rows, torch.int64, logits.device)
        return token_logprobs(logits, row_ids, token_ids, max(counts))
