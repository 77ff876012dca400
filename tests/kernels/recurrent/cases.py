"""What every kind of device must do with a state: checks of each op that keeps one.

Inputs are slices of wider rows, pages lie apart in a wider pool, and NaN is wherever nothing
belongs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.recurrent import reference
from kernels.recurrent.state_runs import StateRun, state_runs
from kernels.recurrent.weights import ConvWeight, ScanWeight, SharedSquares, prepare_delta

DTYPES = [torch.float32, torch.bfloat16]
PAGES = 7


@dataclass(frozen=True)
class Backend:
    """One kind of device, and the dtype of what its linears write."""

    kernels: AnyKernels
    rows_of: Callable[[int, Sequence[StateRun]], Any]  # the rows of a step as it wants them
    dtype: torch.dtype = torch.float32


class Case(Protocol):
    """An op with its weights."""

    rounds: bool  # its result to the dtype of its inputs

    @property
    def widths(self) -> tuple[int, ...]:
        """Of its inputs."""
        ...

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one page."""
        ...

    def apply(
        self, backend: Backend, inputs: Sequence[Tensor], states: Tensor, rows: Any
    ) -> Tensor:
        """Return what the op makes of rows."""
        ...

    def expected(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the reference makes of a sequence, in float64, and its state."""
        ...


def randn(*shape: int, seed: int) -> Tensor:
    """Return numbers that a seed gives."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Conv:
    """A convolution of K taps over C channels."""

    num_taps: int
    num_channels: int
    has_bias: bool = True
    has_silu: bool = True
    rounds = True

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.num_channels,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_taps - 1, self.num_channels

    @property
    def weight(self) -> ConvWeight:
        taps = randn(self.num_taps, self.num_channels, seed=1)
        return ConvWeight(taps, randn(self.num_channels, seed=2) if self.has_bias else None)

    def apply(
        self, backend: Backend, inputs: Sequence[Tensor], states: Tensor, rows: Any
    ) -> Tensor:
        return backend.kernels.causal_conv(
            inputs[0], self.weight, states, rows, has_silu=self.has_silu
        )

    def expected(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        taps, bias = self.weight.taps.double(), self.weight.bias
        bias = None if bias is None else bias.double()
        y, state = reference.causal_conv(inputs[0], taps, bias, state)
        return (F.silu(y) if self.has_silu else y), state


@dataclass(frozen=True)
class ShortConv:
    """LFM2's."""

    num_taps: int
    num_channels: int
    has_bias: bool = False
    rounds = True

    @property
    def widths(self) -> tuple[int, ...]:
        return (3 * self.num_channels,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_taps - 1, self.num_channels

    @property
    def conv(self) -> Conv:
        return Conv(self.num_taps, self.num_channels, self.has_bias, False)

    def apply(
        self, backend: Backend, inputs: Sequence[Tensor], states: Tensor, rows: Any
    ) -> Tensor:
        weight = self.conv.weight
        return backend.kernels.short_conv(inputs[0], weight, states, rows, backend.dtype)

    def expected(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        b, c, x = inputs[0].chunk(3, dim=1)
        y, state = self.conv.expected([b * x], state)
        return c * y, state


@dataclass(frozen=True)
class Scan:
    """Mamba-2's recurrence."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    rounds = False

    @property
    def widths(self) -> tuple[int, ...]:
        inner = self.num_heads * self.head_dim
        return inner + 2 * self.num_groups * self.state_size, self.num_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.state_size, self.head_dim

    @property
    def weight(self) -> ScanWeight:
        a, dt_bias, d = (randn(self.num_heads, seed=seed) for seed in (1, 2, 3))
        return ScanWeight(-a.exp(), dt_bias, d, self.dt_limit)

    def apply(
        self, backend: Backend, inputs: Sequence[Tensor], states: Tensor, rows: Any
    ) -> Tensor:
        return backend.kernels.selective_scan(*inputs, self.weight, states, rows)

    def expected(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        xbc, dt = inputs
        groups = self.num_groups * self.state_size
        x, b, c = xbc.split([self.num_heads * self.head_dim, groups, groups], dim=1)
        b, c = (part.view(-1, self.num_groups, self.state_size) for part in (b, c))
        weight = self.weight
        of_heads = weight.a.double(), weight.dt_bias.double(), weight.d.double()
        x = x.reshape(-1, self.num_heads, self.head_dim)
        y, state = reference.selective_scan(x, b, c, dt, *of_heads, self.dt_limit, state)
        return y.flatten(1), state


@dataclass(frozen=True)
class Delta:
    """A gated delta net's recurrence."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    rounds = False

    @property
    def widths(self) -> tuple[int, ...]:
        keys = self.num_key_heads * self.key_dim
        return 2 * keys + self.num_heads * self.value_dim, self.num_heads, self.num_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    def apply(
        self, backend: Backend, inputs: Sequence[Tensor], states: Tensor, rows: Any
    ) -> Tensor:
        weight = prepare_delta(randn(self.num_heads, seed=1), randn(self.num_heads, seed=2))
        return backend.kernels.gated_delta_rule(*inputs, weight, states, rows)

    def expected(self, inputs: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        qkv, a, b = inputs
        a_log, dt_bias = (randn(self.num_heads, seed=seed).double() for seed in (1, 2))
        keys = self.num_key_heads * self.key_dim
        q, k, v = qkv.split([keys, keys, self.num_heads * self.value_dim], dim=1)
        q, k = (part.reshape(-1, self.num_key_heads, self.key_dim) for part in (q, k))
        v = v.reshape(-1, self.num_heads, self.value_dim)
        decay = torch.exp(-a_log.exp() * F.softplus(a + dt_bias))
        y, state = reference.gated_delta_rule(q, k, v, decay, b.sigmoid(), state)
        return y.flatten(1), state


# Widths that fill vectors, and some that do not.
CASES: tuple[Case, ...] = (
    Conv(4, 64),
    Conv(2, 5, has_bias=False),
    Conv(3, 300, has_silu=False),
    ShortConv(3, 40),
    ShortConv(4, 33, has_bias=True),
    Scan(4, 1, 64, 16),
    Scan(6, 2, 12, 5, dt_limit=(0.3, 1.0)),
    Scan(2, 2, 72, 128),
    Delta(2, 2, 16, 40),
    Delta(2, 6, 12, 5),
    Delta(1, 2, 128, 72),
)


def slices(widths: Sequence[int], num_rows: int, dtype: torch.dtype, seed: int = 5) -> list[Tensor]:
    """Return inputs side by side in wider rows, as a linear writes them."""
    wide = torch.full((num_rows, sum(widths) + 8 * len(widths)), torch.nan, dtype=dtype)
    inputs, start = [], 3
    for index, width in enumerate(widths):
        own = wide[:, start : start + width]
        # Row by row: a row has the same numbers in a step of any size.
        for row in range(num_rows):
            own[row] = randn(width, seed=seed + 100 * row + index).to(dtype)
        inputs.append(own)
        start += width + 8
    return inputs


def pool(shape: tuple[int, ...], seed: int = 9) -> Tensor:
    """Return random states in pages that lie apart."""
    size = torch.Size(shape).numel()
    wide = torch.full((PAGES, size + 16), torch.nan)
    wide[:, 4 : 4 + size] = 0.5 * randn(PAGES, size, seed=seed)
    return wide[:, 4 : 4 + size].unflatten(1, shape)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return how far off a result is, as a share of what is right."""
    return float((actual.double() - expected).norm() / expected.norm())


def tolerance(case: Case, backend: Backend) -> float:
    return 5e-3 if case.rounds and backend.dtype == torch.bfloat16 else 2e-6


def check_it_is_what_the_reference_says(case: Case, backend: Backend) -> None:
    """Compare with float64: three sequences, of which two go on from states that they had."""
    starts, pages = [0, 5, 6, 19], [4, 0, 3]
    runs = state_runs(starts, [5, 7, 20], pages)
    inputs, states = slices(case.widths, 19, backend.dtype), pool(case.state_shape)
    before = states.clone()
    y = case.apply(backend, inputs, states, backend.rows_of(19, runs))
    assert y.dtype == (backend.dtype if case.rounds else torch.float32)
    for run in runs:
        own = [part[run.start : run.stop].double() for part in inputs]
        state = None if run.is_new else before[run.page].double()
        right, after = case.expected(own, state)
        assert error(y[run.start : run.stop], right) < tolerance(case, backend)
        assert error(states[run.page], after) < 2e-6
    others = [page for page in range(PAGES) if page not in pages]
    assert torch.equal(states[others], before[others])


def check_cuts_do_not_change_a_bit(case: Case, backend: Backend) -> None:
    """A sequence of 21 rows in one chunk, in several, and row by row as decodes have it."""
    length = 21
    inputs = slices(case.widths, length, backend.dtype)
    found = []
    for cuts in ([0, 21], [0, 1, 2, 18, 21], [0, 16, 20, 21], list(range(22))):
        states, parts = pool(case.state_shape), []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            runs = [StateRun(0, stop - start, 2, is_new=start == 0)]
            own = [part[start:stop] for part in inputs]
            parts.append(case.apply(backend, own, states, backend.rows_of(stop - start, runs)))
        found.append((torch.cat(parts), states))
    for y, states in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(states, found[0][1])


def check_company_does_not_change_a_bit(case: Case, backend: Backend) -> None:
    """Each of four sequences alone, and all of them in two orders."""
    counts, pages, is_new = [1, 6, 1, 3], [5, 1, 6, 0], [False, True, True, False]
    own = [
        slices(case.widths, count, backend.dtype, seed=1000 * i) for i, count in enumerate(counts)
    ]

    def outputs(order: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        states, runs, start = pool(case.state_shape), [], 0
        for i in order:
            runs.append(StateRun(start, start + counts[i], pages[i], is_new[i]))
            start += counts[i]
        inputs = [torch.cat([own[i][part] for i in order]) for part in range(len(case.widths))]
        y = case.apply(backend, inputs, states, backend.rows_of(start, runs))
        return [y[run.start : run.stop] for run in runs], states

    together, states = outputs([0, 1, 2, 3])
    backwards, same_states = outputs([3, 1, 2, 0])
    assert torch.equal(states, same_states)
    for place, i in enumerate([3, 1, 2, 0]):
        alone, own_states = outputs([i])
        assert torch.equal(alone[0], together[i]) and torch.equal(alone[0], backwards[place])
        assert torch.equal(own_states[pages[i]], states[pages[i]])


def check_a_new_sequence_never_reads_its_page(case: Case, backend: Backend) -> None:
    for num_rows in (1, 2, 9):
        inputs = slices(case.widths, num_rows, backend.dtype)
        found = []
        for rubbish in (torch.nan, torch.inf, 3.0):
            states = pool(case.state_shape)
            states[1] = rubbish
            rows = backend.rows_of(num_rows, [StateRun(0, num_rows, 1, is_new=True)])
            found.append((case.apply(backend, inputs, states, rows), states[1]))
        assert not found[0][0].isnan().any() and not found[0][1].isnan().any()
        for y, state in found[1:]:
            assert torch.equal(y, found[0][0]) and torch.equal(state, found[0][1])


def check_a_sequences_nan_stays_its_own(case: Case, backend: Backend) -> None:
    inputs, states = slices(case.widths, 8, backend.dtype), pool(case.state_shape)
    runs = [StateRun(0, 3, 0, False), StateRun(3, 6, 1, True), StateRun(6, 8, 2, False)]
    clean = case.apply(backend, inputs, states.clone(), backend.rows_of(8, runs))
    states[0] = torch.nan
    for part in inputs:
        part[5] = torch.nan
    y = case.apply(backend, inputs, states, backend.rows_of(8, runs))
    assert torch.equal(y[[3, 4, 6, 7]], clean[[3, 4, 6, 7]])
    assert y[0].isnan().all() and y[5].isnan().all()
    assert states[1].isnan().any() and not states[2].isnan().any()


def check_no_rows_are_no_work(case: Case, backend: Backend) -> None:
    inputs, states = slices(case.widths, 0, backend.dtype), pool(case.state_shape)
    before = states.clone()
    y = case.apply(backend, inputs, states, backend.rows_of(0, []))
    assert y.shape[0] == 0 and torch.equal(states, before)


CHECKS = (
    check_it_is_what_the_reference_says,
    check_cuts_do_not_change_a_bit,
    check_company_does_not_change_a_bit,
    check_a_new_sequence_never_reads_its_page,
    check_a_sequences_nan_stays_its_own,
    check_no_rows_are_no_work,
)

# Features, those of a group.
NORMS = [(64, 64), (80, 16), (15, 5), (1536, 512)]


def check_gated_norm(backend: Backend, width: int, group_size: int, dtype: torch.dtype) -> None:
    """Norm and gate in either order, and the gate alone; each row as it is alone."""
    (gate,) = slices([width], 11, backend.dtype)
    x, weight = 2 * randn(11, width, seed=3), randn(width, seed=4)
    kinds = (weight, True), (weight, False), (weight.to(dtype), True), (None, True)
    for norm, gate_first in kinds:

        def gated(some: slice, norm: Tensor | None = norm, gate_first: bool = gate_first) -> Tensor:
            return backend.kernels.gated_norm(
                x[some], gate[some], norm, group_size, 1e-5, dtype, gate_first=gate_first
            )

        y = gated(slice(None))
        wide = None if norm is None else norm.double()
        right = reference.gated_norm(
            x.double(), gate.double(), wide, group_size, 1e-5, gate_first=gate_first
        )
        assert y.dtype == dtype
        assert error(y, right) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
        assert torch.equal(gated(slice(4, 6)), y[4:6])
        assert gated(slice(0, 0)).shape == (0, width)


def check_a_norm_over_ranks(backend: Backend, width: int) -> None:
    """Two ranks with some features each norm as one that has all."""
    kernels, cut = backend.kernels, width // 3
    (gate,) = slices([width], 11, backend.dtype)
    x, weight = 2 * randn(11, width, seed=3), randn(width, seed=4)
    parts = slice(0, cut), slice(cut, width)
    for gate_first in (True, False):
        own = [(x[:, part].contiguous(), gate[:, part], weight[part]) for part in parts]
        sums = [kernels.gated_squares(*two, gate_first=gate_first) for *two, _ in own]
        shared = SharedSquares(sums[0] + sums[1], width)
        found = [
            kernels.gated_norm(
                *one, len(one[2]), 1e-5, torch.float32, gate_first=gate_first, shared=shared
            )
            for one in own
        ]
        right = reference.gated_norm(
            x.double(), gate.double(), weight.double(), width, 1e-5, gate_first=gate_first
        )
        assert error(torch.cat(found, dim=1), right) < 1e-6
        some = [part[4:6] for part in own[0][:2]]
        alone = kernels.gated_squares(*some, gate_first=gate_first)
        assert torch.equal(alone, sums[0][4:6])
