"""What every kind of device must do with a sparse layer of experts: checks of its kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.experts import ExpertsWeight, RoutedRows, Routing
from kernels.interface import AnyKernels
from kernels.lora import LoraSegment, join_blocks

DTYPES = [torch.float32, torch.bfloat16]
ERRORS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers that a seed gives."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Layer:
    """The weights of some experts and how rows come to them."""

    routing: Routing
    gate_up: Tensor  # [E, 2I, H]
    down: Tensor  # [E, H, I]

    @staticmethod
    def make(
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        dtype: torch.dtype,
        *,
        renormalize: bool = True,
    ) -> "Layer":
        """Return a layer of random weights."""
        return Layer(
            Routing(top_k, renormalize, num_experts),
            (randn(num_experts, 2 * intermediate, hidden, seed=1) / hidden**0.5).to(dtype),
            (randn(num_experts, hidden, intermediate, seed=2) / intermediate**0.5).to(dtype),
        )

    def prepared(self, kernels: AnyKernels) -> tuple[ExpertsWeight, ExpertsWeight]:
        """Return the weights of this rank's experts as kernels want them."""
        first = self.routing.first_expert
        own = slice(first, first + self.routing.num_experts)
        weights = (weight[own].clone() for weight in (self.gate_up, self.down))
        gate_up, down = (kernels.prepare_experts(weight) for weight in weights)
        return gate_up, down

    def expected(
        self,
        x: Tensor,
        logits: Tensor,
        start: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:
        """Return what the layer means, beside an MLP that has returned `start`."""
        routing = self.routing
        chosen, weights = reference.route(logits.double(), routing.top_k, routing.renormalize)
        gate_up, down = self.gate_up.double(), self.down.double()
        beside = (None if one is None else one.double() for one in (start, gates))
        return reference.experts(x.double(), chosen, weights, gate_up, down, *beside)


def compute(
    kernels: AnyKernels,
    x: Tensor,
    logits: Tensor,
    weights: tuple[ExpertsWeight, ExpertsWeight],
    routing: Routing,
    start: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Return a layer's output."""
    gate_up, down = weights
    routed = kernels.route(logits, routing)
    products = kernels.grouped_linear(kernels.permute(x, routed), gate_up, routed)
    activated = kernels.silu_and_mul(products, x.dtype)
    down_products = kernels.grouped_linear(activated, down, routed)
    return kernels.unpermute(down_products, routed, start, gates)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return how far off a result is, as a share of what is right."""
    return float((actual.double() - expected).norm() / expected.norm())


def check_a_layer_is_what_the_reference_says(
    kernels: AnyKernels, layer: Layer, num_rows: int
) -> None:
    """Compare with float64; the logits are the same, so the choice is."""
    dtype, hidden = layer.gate_up.dtype, layer.gate_up.shape[2]
    x = randn(num_rows, hidden, seed=3, dtype=dtype)
    logits = randn(num_rows, len(layer.gate_up), seed=4)
    y = compute(kernels, x, logits, layer.prepared(kernels), layer.routing)
    assert y.shape == (num_rows, hidden)
    assert num_rows == 0 or error(y, layer.expected(x, logits)) < ERRORS[dtype]


def check_the_choice(kernels: AnyKernels) -> None:
    """Equals go to the lower number; NaN is the largest; places stand by expert, then by row."""
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 1.0, 1.0],
            [0.0, -0.0, 0.0, -0.0, 0.0],
            [-torch.inf, -torch.inf, -torch.inf, 2.0, -torch.inf],
            [-1.0, -2.0, -3.0, -0.5, -4.0],
            [0.0, torch.nan, 5.0, torch.inf, 0.0],
        ]
    )
    routed = kernels.route(logits, Routing(3, True, 5))
    starts, rows = routed.starts.tolist(), routed.rows.tolist()
    assert starts == [0, 4, 9, 12, 15, 15]
    experts = [
        [sum(start <= place for start in starts[1:]) for place in of_row]
        for of_row in routed.positions.tolist()
    ]
    assert experts == [[1, 2, 0], [0, 1, 2], [3, 0, 1], [3, 0, 1], [1, 3, 2]]
    for row, places in enumerate(routed.positions.tolist()):
        assert [rows[place] for place in places] == [row] * 3
    for first, end in zip(starts, starts[1:], strict=False):
        assert rows[first:end] == sorted(rows[first:end])
    assert torch.allclose(routed.weights[1], torch.full((3,), 1 / 3))
    assert torch.allclose(routed.weights[2], torch.tensor([1.0, 0.0, 0.0]))
    assert routed.weights[4].isnan().all()


def check_weights_add_up_only_if_they_are_renormalized(kernels: AnyKernels) -> None:
    """Compare the weights of both ways with the reference's."""
    logits = randn(9, 13, seed=5)
    for renormalize in (False, True):
        for top_k in (1, 4, 13):
            routed = kernels.route(logits, Routing(top_k, renormalize, 13))
            _, weights = reference.route(logits.double(), top_k, renormalize)
            assert error(routed.weights, weights) < 1e-6


def check_a_row_has_the_same_bits_in_any_company(kernels: AnyKernels, layer: Layer) -> None:
    """Alone, among others, in another order, and where one expert has all rows or few."""
    dtype, (num_experts, _, hidden) = layer.gate_up.dtype, layer.gate_up.shape
    x, logits = randn(150, hidden, seed=6, dtype=dtype), randn(150, num_experts, seed=7)
    logits[40:] += torch.arange(num_experts) * 3.0  # most rows like the same experts
    weights = layer.prepared(kernels)

    def layer_of(rows: Tensor) -> Tensor:
        return compute(kernels, x[rows], logits[rows], weights, layer.routing)

    everything = layer_of(torch.arange(150))
    order = torch.randperm(150, generator=torch.Generator().manual_seed(8))
    for rows in (torch.tensor([0]), torch.tensor([149]), torch.arange(3, 19), order[:70], order):
        assert torch.equal(layer_of(rows), everything[rows])


def check_a_rows_nan_stays_in_its_row(kernels: AnyKernels, layer: Layer) -> None:
    """In its inputs, and in its logits."""
    dtype, (num_experts, _, hidden) = layer.gate_up.dtype, layer.gate_up.shape
    x, logits = randn(20, hidden, seed=9, dtype=dtype), randn(20, num_experts, seed=10)
    weights = layer.prepared(kernels)
    clean = compute(kernels, x, logits, weights, layer.routing)
    others = torch.arange(20) != 7
    broken = x.clone()
    broken[7, 3] = torch.nan
    y = compute(kernels, broken, logits, weights, layer.routing)
    assert torch.equal(y[others], clean[others]) and y[7].isnan().all()
    logits[7] = torch.nan
    y = compute(kernels, x, logits, weights, layer.routing)
    assert torch.equal(y[others], clean[others]) and y[7].isnan().all()


def check_ranks_with_experts_of_their_own_add_up(kernels: AnyKernels, layer: Layer) -> None:
    """Whole experts dealt over two ranks: the sum of both is the layer."""
    dtype, (num_experts, _, hidden) = layer.gate_up.dtype, layer.gate_up.shape
    x, logits = randn(30, hidden, seed=11, dtype=dtype), randn(30, num_experts, seed=12)
    cut, how = num_experts // 3, layer.routing
    parts = []
    for first, end in ((0, cut), (cut, num_experts)):
        routing = Routing(how.top_k, how.renormalize, end - first, first)
        own = Layer(routing, layer.gate_up, layer.down)
        parts.append(compute(kernels, x, logits, own.prepared(kernels), routing).float())
    assert error(parts[0] + parts[1], layer.expected(x, logits)) < ERRORS[dtype]


def check_a_sum_starts_with_what_stands_beside_the_experts(
    kernels: AnyKernels, layer: Layer
) -> None:
    """With gates, which a router makes behind its logits, and without; alone as in company."""
    dtype, (num_experts, _, hidden) = layer.gate_up.dtype, layer.gate_up.shape
    x, start = randn(30, hidden, seed=13, dtype=dtype), randn(30, hidden, seed=14)
    logits, gates = randn(30, num_experts + 1, seed=15).split((num_experts, 1), dim=1)
    gates *= 3
    weights = layer.prepared(kernels)
    for own_gates in (None, gates):
        y = compute(kernels, x, logits, weights, layer.routing, start, own_gates)
        assert y.dtype == torch.float32  # as what it starts with
        assert error(y, layer.expected(x, logits, start, own_gates)) < ERRORS[dtype]
        for row in (0, 17):
            alone = slice(row, row + 1)
            own = None if own_gates is None else own_gates[alone]
            found = compute(
                kernels, x[alone], logits[alone], weights, layer.routing, start[alone], own
            )
            assert torch.equal(found[0], y[row])


@dataclass(frozen=True)
class ExpertAdapter:
    """The LoRA of one expert, as a segment of rows that mean nothing."""

    segment: LoraSegment
    widths: list[int]

    @staticmethod
    def make(
        inputs: int, widths: list[int], ranks: list[int], dtype: torch.dtype, seed: int
    ) -> "ExpertAdapter":
        """Return one of random weights, with some lora_ranks of its own for each module."""
        a = (randn(sum(ranks), inputs, seed=seed) / inputs**0.5).to(dtype)
        firsts = [sum(widths[:index]) for index in range(len(widths))]
        parts = [
            randn(w, r, seed=seed + 1, dtype=dtype) for w, r in zip(widths, ranks, strict=True)
        ]
        b, blocks = join_blocks(list(zip(firsts, parts, strict=True)))
        return ExpertAdapter(LoraSegment(0, 0, a, b, blocks), widths)

    def line(self) -> list[int]:
        """Return its line of a table of addresses."""
        a, b = self.segment.a, self.segment.b
        line = [a.data_ptr(), len(a), 0, 0, 0]
        for first_rank, end_rank, _, _, element in self.segment.blocks.tolist():
            line += [b.data_ptr() + element * b.itemsize, first_rank, end_rank - first_rank]
        return line

    def delta(self, x: Tensor) -> Tensor:
        """Return what it adds for inputs [K], in float64."""
        inner, b = self.segment.a.double() @ x.double(), self.segment.b
        y = torch.zeros(sum(self.widths), dtype=torch.float64)
        for first_rank, end_rank, first, end, element in self.segment.blocks.tolist():
            width, ranks = end - first, end_rank - first_rank
            block = b[element : element + ranks * width].view(ranks, width)
            y[first:end] = inner[first_rank:end_rank] @ block.double()
        return y


Slots = list[list[ExpertAdapter | None]]  # [slots][experts]


def some_slots(num_experts: int, inputs: int, widths: list[int], dtype: torch.dtype) -> Slots:
    """Return three adapters of unequal lora_ranks; one leaves every other expert alone."""
    ranks = [[4] * len(widths), list(range(3, 3 + len(widths))), [16] * len(widths)]
    return [
        [
            None
            if slot == 1 and expert % 2
            else ExpertAdapter.make(inputs, widths, of_slot, dtype, 100 * slot + expert)
            for expert in range(num_experts)
        ]
        for slot, of_slot in enumerate(ranks)
    ]


def table_of(slots: Slots) -> Tensor:
    """Return the table [slots, experts, fields] int64 of addresses."""
    width = max(len(one.line()) for of_slot in slots for one in of_slot if one is not None)
    return torch.tensor(
        [[[0] * width if one is None else one.line() for one in of_slot] for of_slot in slots]
    )


def expected_deltas(
    x: Tensor, slots: Slots, runs: list[tuple[int, int, int]], routed: RoutedRows
) -> Tensor:
    """Return what the adapters add to each pair's products, in float64."""
    starts, deltas = routed.starts.tolist(), []
    for pair, row in enumerate(routed.rows.tolist()):
        expert = sum(start <= pair for start in starts[1:])
        slot = next((slot for slot, start, stop in runs if start <= row < stop), None)
        adapter = None if slot is None else slots[slot][expert]
        widths = next(one.widths for one in slots[0] if one is not None)
        none = torch.zeros(sum(widths), dtype=torch.float64)
        deltas.append(none if adapter is None else adapter.delta(x[pair]))
    return torch.stack(deltas)
