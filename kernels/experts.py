"""A sparse layer of experts: each row's k best of E experts, and the products for these alone.

A row and one of its experts are a pair. Pairs stand by expert, so that a product takes all rows of
an expert at once, and those of an expert by row, so that the rows of one adapter stay side by side.
Where a pair stands depends on the batch; what is computed for it does not.

Shapes: T rows, k experts of a row, P = T k pairs, E experts of this rank, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.elementwise import in_whole_vectors
from kernels.linear import LinearWeight, SharedInputs, linear, prepare_linear
from kernels.lora import LoraSegment, lora_apply


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a row are chosen, and which experts a rank has.

    Each rank chooses among all; with whole experts dealt over ranks, it computes the pairs of its
    own and leaves the others to theirs.
    """

    top_k: int
    renormalize: bool  # the weights of a row's k experts add up to 1
    num_experts: int  # of this rank
    first_expert: int = 0  # the number of this rank's first among all


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """The pairs of a batch; integers are of a kind's own dtype.

    Pairs of experts that this rank lacks stand behind all others, and nothing is computed for them.
    """

    weights: Tensor  # [T, k] float32, of each row's experts, the best first
    positions: Tensor  # [T, k], where their pairs stand
    rows: Tensor  # [P], the row of each pair
    starts: Tensor  # [E + 1], the first pair of each expert, and where this rank's pairs end

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertsWeight:
    """The weights [E, N, K] and biases [E, N] of a linear of each expert, ready for use."""

    linears: tuple[LinearWeight, ...]  # one for each expert, or all in one, one behind the other
    num_experts: int
    in_features: int
    out_features: int
    dtype: torch.dtype

    @property
    def shared(self) -> SharedInputs | None:
        """Which inputs these are, where ranks add up their sums before they scale them."""
        return self.linears[0].shared

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and biases, a layout's padding with them."""
        return sum(weight.num_bytes for weight in self.linears)


# Of weights [E, N, K] and biases [E, N].
PrepareExperts = Callable[[Tensor, Tensor | None], ExpertsWeight]


@dataclass(frozen=True, slots=True)
class ExpertLoraRun:
    """Rows [start, stop) of a batch that share one adapter, and its LoRA of each expert.

    A segment's own rows mean nothing; None leaves an expert as it is.
    """

    start: int
    stop: int
    experts: Sequence[LoraSegment | None]  # [E]


def route(logits: Tensor, routing: Routing) -> RoutedRows:
    """Choose the experts of each row and sort the pairs.

    The best are those of the largest logits, NaN the largest of all, the lower number of equals.
    Their weights are the softmax over all logits, or over the chosen ones if they are renormalised.

    Args:
        logits: [T, experts of all ranks], of any float dtype.
        routing: how.
    """
    logits = logits.float()
    experts = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = torch.softmax(logits, dim=-1).gather(1, experts)  # each row by itself, unlike exp
    if routing.renormalize:
        total = weights[:, 0]
        for column in weights.unbind(dim=1)[1:]:
            total = total + column
        weights = weights / total.unsqueeze(1)
    own = experts.flatten() - routing.first_expert
    own[(own < 0) | (own >= routing.num_experts)] = routing.num_experts
    sorted_experts, pairs = torch.sort(own, stable=True)
    positions = torch.empty_like(pairs)
    positions[pairs] = torch.arange(len(pairs))
    return RoutedRows(
        weights=weights,
        positions=positions.view(experts.shape),
        rows=pairs // routing.top_k,
        starts=torch.searchsorted(sorted_experts, torch.arange(routing.num_experts + 1)),
    )


def permute(x: Tensor, routed: RoutedRows) -> Tensor:
    """Return the row [P, K] of each pair of x [T, K]."""
    return x[routed.rows]


def prepare_experts(weight: Tensor, bias: Tensor | None = None) -> ExpertsWeight:
    """Pack weights for `grouped_linear`; the caller can drop its own copy afterwards.

    Args:
        weight: [E, N, K] float32 or bfloat16.
        bias: [E, N] of the same dtype, or None.
    """
    num_experts, out_features, in_features = weight.shape
    linears = tuple(
        prepare_linear(weight[expert], None if bias is None else bias[expert])
        for expert in range(num_experts)
    )
    return ExpertsWeight(linears, num_experts, in_features, out_features, weight.dtype)


def grouped_linear(x: Tensor, weight: ExpertsWeight, routed: RoutedRows) -> Tensor:
    """Return each pair's x [P, K] @ its expert's weight transposed + bias as [P, N].

    Rows of pairs whose expert is another rank's hold anything.
    """
    y = x.new_empty(x.shape[0], weight.out_features)
    for expert, (start, stop) in _spans(routed):
        y[start:stop] = linear(x[start:stop], weight.linears[expert])
    return y


def unpermute(
    y: Tensor, routed: RoutedRows, start: Tensor | None = None, gates: Tensor | None = None
) -> Tensor:
    """Return the sum [T, N] of each row's pairs of y [P, N] times their weights.

    In float32, in ascending order of a row's experts, the best first; rounded once.

    Args:
        y: of this rank's pairs.
        routed: where they stand.
        start: [T, N], what the sum begins with; None: nothing.
        gates: [T, 1], whose sigmoid that is multiplied by before; None: 1.
    """
    total = torch.zeros(routed.positions.shape[0], y.shape[1])
    if start is not None:
        total = start.float()
    if gates is not None:
        total = total * in_whole_vectors(gates.float(), torch.sigmoid_)
    is_own = routed.positions < routed.starts[-1]
    columns = zip(
        *(part.unbind(dim=1) for part in (routed.positions, routed.weights, is_own)), strict=True
    )
    for positions, weights, own in columns:
        added = total + weights.unsqueeze(1) * y[positions].float()
        total = torch.where(own.unsqueeze(1), added, total)
    return total.to(y.dtype if start is None else start.dtype)


def grouped_lora_apply(
    y: Tensor, x: Tensor, runs: Sequence[ExpertLoraRun], routed: RoutedRows
) -> None:
    """Add to each pair of y [P, N] the LoRA of its row's adapter and its expert of x [P, K]."""
    segments = []
    for expert, (start, stop) in _spans(routed):
        rows = routed.rows[start:stop]
        for run in runs:
            segment = run.experts[expert]
            first, end = torch.searchsorted(rows, torch.tensor((run.start, run.stop))).tolist()
            if segment is not None and first < end:
                segments.append(replace(segment, start=start + first, stop=start + end))
    lora_apply(y, x, segments)


def _spans(routed: RoutedRows) -> list[tuple[int, tuple[int, int]]]:
    """Return the experts that have pairs, and where these stand."""
    starts = routed.starts.tolist()
    spans = enumerate(zip(starts, starts[1:], strict=False))
    return [(expert, (start, stop)) for expert, (start, stop) in spans if start < stop]
