"""The functions of a sparse layer of experts, by the C functions of kernels.native.

Shapes: T rows, k experts of a row, P = T k pairs, E experts of this rank, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.experts import ExpertsWeight, RoutedRows, Routing
from kernels.native.linears import NativeLinears
from kernels.native.lora import NativeLora
from kernels.native.op_runner import at
from kernels.native.ops import (
    GroupedLinearOp,
    GroupedLoraOp,
    GroupedQuantizedLinearOp,
    PairRunsOp,
    PermuteOp,
    RouteOp,
    SortPairsOp,
    UnpermuteOp,
    linear_op,
)
from kernels.native.packing import PANEL, pack_quantized
from kernels.quantized import QuantizedWeight


class NativeExperts(NativeLinears):
    """See `kernels.interface.Kernels`."""

    def prepare_experts(self, weight: Tensor, bias: Tensor | None = None) -> ExpertsWeight:
        num_experts, out_features, in_features = weight.shape
        missing = -out_features % PANEL
        if missing:  # each expert begins with a panel of its own
            weight = F.pad(weight, (0, 0, 0, missing))
        if bias is not None:
            bias = F.pad(bias, (0, missing)).flatten()
        linear = self.prepare_linear(weight.flatten(0, 1), bias)
        return ExpertsWeight((linear,), num_experts, in_features, out_features, weight.dtype)

    def prepare_quantized_experts(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> ExpertsWeight:
        out_features, in_features = weights[0].codes.shape
        if bias is not None:
            bias = F.pad(bias, (0, -out_features % PANEL)).flatten()
        linear = pack_quantized(weights, bias, dtype, self._memory)
        return ExpertsWeight((linear,), len(weights), in_features, out_features, dtype)

    def route(self, logits: Tensor, routing: Routing) -> RoutedRows:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, "as a linear writes them"
        num_rows, top_k = logits.shape[0], routing.top_k
        experts = self._out("experts", num_rows, (top_k,), torch.int64)
        weights = self._out("expert weights", num_rows, (top_k,), torch.float32)
        routed = RoutedRows(
            weights=weights,
            positions=self._out("positions of pairs", num_rows, (top_k,), torch.int64),
            rows=self._out("rows of pairs", num_rows * top_k, (), torch.int64),
            starts=torch.empty(routing.num_experts + 1, dtype=torch.int64),
        )
        choose = RouteOp(
            *map(at, (logits, experts, weights)),
            logits.shape[1],
            logits.stride(0),
            top_k,
            routing.renormalize,
        )
        self._do("route", choose, num_rows, (logits, experts, weights))
        places = experts, routed.positions, routed.rows, routed.starts
        sort = SortPairsOp(*map(at, places), top_k, routing.num_experts, routing.first_expert)
        self._do("sort_pairs", sort, num_rows, places)
        return routed

    def permute(self, x: Tensor, routed: RoutedRows) -> Tensor:
        assert x.stride(1) == 1, "the inputs of a row must be contiguous"
        out = self._out("permuted", routed.num_pairs, (x.shape[1],), x.dtype)
        tensors = x, routed.rows, routed.starts, out
        op = PermuteOp(
            at(x),
            at(routed.rows),
            at(routed.starts[-1:]),
            at(out),
            x.stride(0) * x.itemsize,
            x.shape[1] * x.itemsize,
        )
        self._do("permute", op, x.shape[0], tensors)
        return out

    def grouped_linear(self, x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
        (all_experts,) = weight.linears
        y = self._out("grouped", x.shape[0], (weight.out_features,), torch.float32)
        counts = at(routed.starts), weight.num_experts
        if all_experts.is_quantized:
            quantized, of_quantized = self._quantized_op(x, all_experts, y)
            grouped = GroupedQuantizedLinearOp(quantized, *counts)
            of_grouped = (*of_quantized, routed.starts)
            self._do("grouped_quantized_linear", grouped, x.shape[0], of_grouped)
            return y
        linear, tensors = linear_op(x, all_experts, y)
        linear.num_outputs = weight.out_features
        op = GroupedLinearOp(linear, *counts)
        self._do("grouped_linear", op, x.shape[0], (*tensors, routed.starts))
        return y

    def grouped_lora_apply(  # type: ignore[override]
        self, y: Tensor, x: Tensor, rows: NativeLora, routed: RoutedRows
    ) -> None:
        num_pairs, num_experts = routed.num_pairs, routed.starts.shape[0] - 1
        runs = self._out("runs of pairs", num_pairs, (3,), torch.int64)
        num_runs = torch.zeros(1, dtype=torch.int64)
        find = PairRunsOp(*map(at, (routed.rows, routed.starts, runs, num_runs)), num_experts)
        self._do("pair_runs", find, rows.step, (routed.rows, routed.starts, runs, num_runs))
        lora, of_lora = self._lora_op(y, x, rows, "inner of pairs")
        op = GroupedLoraOp(lora, at(runs), at(num_runs))
        tensors = *of_lora, runs, num_runs
        self._do("grouped_lora_shrink", op, rows.step, tensors)
        self._do("grouped_lora_expand", op, rows.step, tensors)

    def unpermute(
        self,
        y: Tensor,
        routed: RoutedRows,
        start: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        num_rows, top_k = routed.positions.shape
        for part in (start, gates):
            assert part is None or part.dtype == torch.float32, "as linears write them"
        assert start is None or start.is_contiguous(), "contiguous rows"
        out = self._out("unpermuted", num_rows, (y.shape[1],), torch.float32)
        of_pairs = y, routed.weights, routed.positions, routed.starts[-1:]
        op = UnpermuteOp(
            *map(at, (*of_pairs, start, gates, out)),
            top_k,
            y.shape[1],
            0 if gates is None else gates.stride(0),
        )
        tensors = y, routed.weights, routed.positions, routed.starts, start, gates, out
        self._do("unpermute", op, num_rows, tensors)
        return out
