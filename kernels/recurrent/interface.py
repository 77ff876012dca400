"""The functions of layers whose past is a state, as every kind of device offers them.

A recurrence goes through a sequence's rows in their order, one after the other, whether a step has
one of them or a thousand: its bits depend neither on how a prompt is cut into chunks nor on what
else is in the step. Faster forms for prompts, which take rows in blocks (the chunked scans of
Mamba-2 and of gated delta nets), round otherwise than a decode does.

Shapes: T rows, P state pages, C channels, K taps, H heads of D features, G groups of N state
features; HK key heads of DK features, HV value heads of DV, HV a multiple of HK. States are float32
and lie as `kernels.recurrent.state_runs` says; a page's may lie apart from the next one's.
"""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kernels.recurrent.weights import ConvWeight, DeltaWeight, ScanWeight, SharedSquares

StateRows = TypeVar("StateRows", contravariant=True)


class RecurrentKernels(Protocol[StateRows]):
    """What every kind of device can do with states.

    Arguments that a linear wrote may be slices of its outputs: each row contiguous.
    """

    def causal_conv(
        self, x: Tensor, weight: ConvWeight, states: Tensor, rows: StateRows, *, has_silu: bool
    ) -> Tensor:
        """Return each channel's sum of its last K inputs times its taps, in x's dtype.

        Args:
            x: [T, C].
            weight: taps and bias, added up in float32 from the bias to the newest input.
            states: [P, K - 1, C], the last inputs, the newest last; changed.
            rows: whose the rows are.
            has_silu: whether the sums go through SiLU.
        """
        ...

    def short_conv(
        self, bcx: Tensor, weight: ConvWeight, states: Tensor, rows: StateRows, dtype: torch.dtype
    ) -> Tensor:
        """Return c * the convolution of b * x [T, C] in `dtype`: LFM2's, with both its gates.

        Args:
            bcx: [T, 3C]: b, c and x side by side.
            weight: as above.
            states: [P, K - 1, C], the last products b * x; changed.
            rows: whose the rows are.
            dtype: of the result, which a linear reads.
        """
        ...

    def selective_scan(
        self, xbc: Tensor, dt: Tensor, weight: ScanWeight, states: Tensor, rows: StateRows
    ) -> Tensor:
        """Return the outputs [T, H D] float32 of Mamba-2's recurrence.

        Head h has group h * G // H. With dt = clamp(softplus(dt + dt_bias)), for each row
        S = exp(dt a) S + b (dt x)^T and y = S^T c + d x.

        Args:
            xbc: [T, H D + 2 G N]: x, b and c side by side.
            dt: [T, H].
            weight: a, dt_bias and d.
            states: [P, H, N, D]: S, the transpose of what transformers keeps; changed.
            rows: whose the rows are.
        """
        ...

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        weight: DeltaWeight,
        states: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """Return the outputs [T, HV DV] float32 of a gated delta net's recurrence.

        Value head h has key head h * HK // HV. With q and k divided by their lengths, q by
        sqrt(DK) as well, and decay = exp(weight.a softplus(a + dt_bias)), for each row
        S = decay S, S = S + k (sigmoid(b) (v - S^T k))^T and o = S^T q.

        Args:
            qkv: [T, 2 HK DK + HV DV]: q, k and v side by side.
            a: [T, HV].
            b: [T, HV].
            weight: a and dt_bias.
            states: [P, HV, DK, DV]: S; changed.
            rows: whose the rows are.
        """
        ...

    def gated_squares(self, x: Tensor, gate: Tensor, *, gate_first: bool) -> Tensor:
        """Return the squares of what `gated_norm` norms, over all features: [T, 1] float32.

        For a norm over features of several ranks, which add up their sums; arguments as there.
        """
        ...

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        group_size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        gate_first: bool,
        shared: SharedSquares | None = None,
    ) -> Tensor:
        """Return the RMS norm of x in groups, gated by silu(gate): [T, W] in `dtype`.

        Args:
            x: [T, W] float32.
            gate: [T, W].
            weight: [W] of the norm; None: there is no norm, only the gate.
            group_size: features that are normed together, a divisor of W.
            eps: added to the mean squares.
            dtype: of the result, which a linear reads.
            gate_first: whether what is normed is x * silu(gate), rather than x.
            shared: the squares of all ranks, whose features are one group, in place of one's own.
        """
        ...
