"""The functions that a forward pass is made of, as every kind of device offers them.

A model, a batch and a sampler take a `Kernels` and ask no further which device it is.

Shapes: T rows, S sampled rows, V vocabulary, H hidden, I intermediate, HQ / HK query and KV heads
of this rank, D head_dim of which R features rotate, P pages, K inputs, N outputs; E experts of this
rank, k of a row, and pairs, T k of a row and one of its experts.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.elementwise import GatedActivation
from kernels.experts import ExpertsWeight, RoutedRows, Routing
from kernels.linear import LinearWeight
from kernels.lora import WriteCodes
from kernels.quantized import QuantizedLinears
from kernels.recurrent.interface import RecurrentKernels, StateRows
from kernels.sampling import RowDraws, RowSampling

Numbers = Sequence[float] | npt.NDArray[Any]  # on the host, to be sent to a device
AttentionRows = TypeVar("AttentionRows", contravariant=True)
LoraRows = TypeVar("LoraRows", contravariant=True)
ExpertLoraRows = TypeVar("ExpertLoraRows", contravariant=True)


class Readback(Protocol):
    """Tensors on their way to the host, behind all work that the device was given before."""

    @property
    def is_ready(self) -> bool:
        """Whether `read` waits for nothing."""
        ...

    def read(self) -> Sequence[Tensor]:
        """Wait until that work is done and return the tensors on the host; from any thread."""
        ...


class Kernels(
    RecurrentKernels[StateRows],
    Protocol[AttentionRows, LoraRows, ExpertLoraRows, StateRows],
):
    """What every kind of device can do. Row i of a result depends on row i of the arguments alone.

    The host waits for the device in `Readback.read` alone: all else is only asked for.

    Products have the weights' dtype or float32, as a kind likes; all else takes either.

    `AttentionRows`, `LoraRows`, `ExpertLoraRows` and `StateRows` are what a runner of that kind
    makes of a batch.
    """

    pins_memory: bool  # whether host memory that the device copies from is to stay in place
    uses_pointer_tables: bool  # whether LoRAs are found by a table of addresses
    uses_torch_threads: bool  # whether steps are computed by those of torch, on a CPU
    # Whether attention takes what pages hold behind a sequence's context for numbers, if with a
    # weight of zero: those that are given out have to be cleared then.
    reads_past_contexts: bool
    products: str  # by what matrix products are computed, for people to read

    @property
    def quantized(self) -> QuantizedLinears | None:
        """What makes quantized weights ready for `linear`; None: it takes none."""
        ...

    @property
    def write_lora_codes(self) -> WriteCodes | None:
        """What brings A and B of linears into int8, beside steps; None: they cannot lie in it."""
        ...

    def adapter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which adapters of a model served in `dtype` lie on the device."""
        ...

    def loading(self, device: torch.device) -> AbstractContextManager[None]:
        """Queue what is queued inside beside the steps; at its end it is done.

        It begins when the steps that are queued by then are done. Whoever enters waits, and no step
        does.
        """
        ...

    def empty_pool(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a tensor that is not filled, for the pages that steps read."""
        ...

    def send(self, numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return numbers of the host on the device; they may change as soon as it returns."""
        ...

    def start_readback(self, tensors: Sequence[Tensor], device: torch.device) -> Readback:
        """Begin to bring tensors, maybe none, to the host; nobody may change them any more."""
        ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (the RMS norm of x + residual, x + residual in float32).

        Args:
            x: [T, H], the output of a block.
            residual: [T, H] float32; None is 0.
            weight: [H] of the norm; None: there is no norm, the sum is rounded to `dtype`.
            eps: added to the mean square.
            dtype: of the normed rows; None: weight's.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of x [T, H] in its dtype, for a block whose output is normed."""
        ...

    def square_sums(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, *, counts_kv: bool
    ) -> Tensor:
        """Return the squares of a row's Q, and of its K, added up: [T, 2] float32.

        Args:
            qkv: [T, HQ + 2 HK, D].
            num_heads: HQ.
            num_kv_heads: HK.
            counts_kv: whether K is this rank's to count; else its sum is 0.
        """
        ...

    def wide_norm(
        self,
        qkv: Tensor,
        sums: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        widths: tuple[int, int],
        eps: float,
    ) -> None:
        """Norm Q and K, in place, each over all its heads on all ranks.

        Args:
            qkv: [T, HQ + 2 HK, D], changed.
            sums: [T, 2], `square_sums` summed over the ranks.
            q_norm: [HQ D], this rank's part of the norm's weight.
            k_norm: [HK D], likewise.
            widths: features of Q and of K over all ranks.
            eps: added to the mean squares.
        """
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """Return a weight [N, K] and bias [N] as `linear` wants them; may take them over."""
        ...

    def linear(self, x: Tensor, weight: LinearWeight, lora: LoraRows | None = None) -> Tensor:
        """Return x [T, K] @ weight transposed + bias as [T, N], each row's own LoRA added.

        Its rows may lie further apart than N.
        """
        ...

    def gated_linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        activation: GatedActivation,
        lora: LoraRows | None = None,
    ) -> Tensor:
        """Return activation(gate) * up [T, I] of what `linear` returns [T, 2I], the gate first."""
        ...

    def partial_linear(
        self, x: Tensor, weight: LinearWeight, lora: LoraRows | None = None
    ) -> Tensor:
        """Return this rank's part [T, N] of a product that is summed over the ranks, LoRA with it.

        It is in one piece. With `deterministic`, in float32, and the sum does not depend on how
        many ranks there are, as long as they hold equal parts of K and there is no bias.
        """
        ...

    def lora_apply(self, y: Tensor, x: Tensor, rows: LoraRows) -> None:
        """Add each row's own LoRA of x [T, K] to y [T, N], in place."""
        ...

    def prepare_experts(self, weight: Tensor, bias: Tensor | None = None) -> ExpertsWeight:
        """Return weights [E, N, K] and biases [E, N] as `grouped_linear` wants them.

        It may take them over.
        """
        ...

    def route(self, logits: Tensor, routing: Routing) -> RoutedRows:
        """Choose the experts of each row of logits [T, experts of all ranks], and sort the pairs.

        The best are those of the largest logits, NaN the largest of all, the lower number of
        equals. Their weights, in float32, are the softmax over all logits, or over the chosen ones
        if they are renormalised.
        """
        ...

    def permute(self, x: Tensor, routed: RoutedRows) -> Tensor:
        """Return the row of each pair [pairs, K] of x [T, K]."""
        ...

    def grouped_linear(self, x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
        """Return each pair's x [pairs, K] @ its expert's weight transposed + bias [pairs, N].

        The weights of experts without pairs are not read. Pairs of other ranks' experts hold
        anything.
        """
        ...

    def grouped_lora_apply(
        self, y: Tensor, x: Tensor, rows: ExpertLoraRows, routed: RoutedRows
    ) -> None:
        """Add to each pair of y [pairs, N], in place, a LoRA of its x [pairs, K].

        It is that which the adapter of the pair's row has of the pair's expert.
        """
        ...

    def unpermute(
        self,
        y: Tensor,
        routed: RoutedRows,
        start: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        """Return each row's sum [T, N] of its pairs of y [pairs, N] times their weights.

        Summed in float32 from a row's best expert to its last, without those of other ranks, in the
        dtype of what the sum starts with, or of y.

        Args:
            y: of the pairs.
            routed: where they stand.
            start: [T, N], of any float dtype, what the sum starts with; None: nothing.
            gates: [T, 1], likewise, whose sigmoid that is multiplied by before; None: 1.
        """
        ...

    def rope_and_write(
        self,
        qkv: Tensor,
        num_heads: int,
        cos: Tensor,
        sin: Tensor,
        rows: AttentionRows,
        k_pages: Tensor,
        v_pages: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Norm and rotate Q and K, store K and V in their pages; return Q [T, HQ, D].

        Args:
            qkv: [T, HQ + 2 HK, D].
            num_heads: HQ.
            cos: [max_position, R/2] float32; what does not rotate of a head comes last.
            sin: [max_position, R/2] float32.
            rows: the positions, and where K and V go.
            k_pages: [P, HK, page, D] of `dtype`, changed in place; on CPUs also [P, HK, page,
                D + 2] int8, as `kernels.int8_kv` has rows.
            v_pages: likewise.
            q_norm: [D], the RMS norm of each query head before its rotation, or None.
            k_norm: [D], likewise.
            eps: of these norms.
            dtype: of Q.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: AttentionRows,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return softmax(scale q k) v [T, HQ, D] of every row up to its own position.

        With a window, over as many positions at most, its own the last of them. With sinks [HQ]
        float32, over one more score of each head, which is no position's and has no V.
        """
        ...

    def gate_heads(self, x: Tensor, gates: Tensor) -> None:
        """Multiply what attention returned, x [T, HQ, D], by sigmoid(gates) in place.

        Args:
            x: changed; computed in float32 and rounded once.
            gates: [T, HQ D] as products are; rows may be strided.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """Return silu(gate) * up [T, I] in the weights' dtype for gate_up [T, 2I], gate first."""
        ...

    def gelu_tanh_and_mul(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        """Return gelu(gate) * up, by the approximation with tanh; else as `silu_and_mul`."""
        ...

    def swigluoai_and_mul(
        self, gate_up: Tensor, dtype: torch.dtype, alpha: float, limit: float
    ) -> Tensor:
        """Return gate * sigmoid(alpha gate) * (up + 1); else as `silu_and_mul`.

        The gate is cut to at most `limit` before, and up to between -limit and limit.
        """
        ...

    def save_pages(
        self, pool: Tensor, sources: Sequence[int], host: Tensor, targets: Sequence[int]
    ) -> None:
        """Copy pages of a pool to host pages; the shapes are those of `kernels.page_copy`."""
        ...

    def restore_pages(
        self, host: Tensor, sources: Sequence[int], pool: Tensor, targets: Sequence[int]
    ) -> None:
        """Copy host pages to pages of a pool."""
        ...

    def save_states(self, page: Tensor, host: Tensor) -> None:
        """Copy a page of states [n] float32 to a host page."""
        ...

    def restore_states(self, host: Tensor, page: Tensor) -> None:
        """Copy a host page to a page of states."""
        ...

    def fork_pages(
        self,
        pool: Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        num_positions: Sequence[int],
    ) -> None:
        """Copy the first positions of each source, and put zeros behind; no target is a source."""
        ...

    def clear_pages(self, pool: Tensor, pages: Sequence[int] | Tensor) -> None:
        """Fill pages of a pool with zeros; their numbers may be on the device already, in int32."""
        ...

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest of each row [S, V] float32 and its id, the lowest of equals.

        NaN is larger than all.
        """
        ...

    def where_finite(self, values: Tensor, token_ids: Tensor, other: int) -> Tensor:
        """Return new token ids [S] int64, `other` where a value [S] float32 is no finite number."""
        ...

    def keep_allowed(
        self, logits: Tensor, rows: Sequence[int], allowed: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """Set logits of some rows to -inf whose bit in `allowed`, on the host, is 0.

        Args:
            logits: [S, V] float32, changed in place.
            rows: at least one.
            allowed: of each of them [ceil(V / 8)]; the first token has the lowest bit of the first
                byte, and bits behind the last token are 0.
        """
        ...

    def send_draws(
        self,
        rows: Sequence[int],
        draws: Sequence[RowSampling],
        positions: Sequence[int],
        device: torch.device,
    ) -> RowDraws:
        """Return S draws, their rows and positions in a step, on the device: sent in one copy."""
        ...

    def sample_rows(self, logits: Tensor, draws: RowDraws) -> Tensor:
        """Return the token [S] int64 drawn from each row of [S, V] float32, finite or -inf.

        The logits are not changed. A row that holds NaN or +inf, or nothing but -inf, gets some
        token of the vocabulary.
        """
        ...

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probabilities of tokens, and of the best tokens, of some rows.

        Args:
            logits: [S, V] float32, any values.
            rows: R of them, at least one.
            token_ids: [S] int64.
            counts: R, how many of the best each row asks for.

        Returns:
            That of each row's token [R] float32; and ids [R, C] int64 and log-probabilities [R, C]
            float32 of the best tokens, the best first, the lower id of equals: of each row at
            least as many as it asks for, but those behind its last finite one are -inf.
        """
        ...


AnyKernels = Kernels[Any, Any, Any, Any]
