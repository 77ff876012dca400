"""A sparse layer of experts on one rank: the router's choice, and the products of what it chose.

Every rank has the whole router and all experts, of each a part of its features; so ranks choose
alike, for the rows that come to them have the same bits, and their outputs are summed. What an MLP
beside the experts returns, times the sigmoid of a gate if it has one, is part of the same sum.

Shapes: T rows, k experts of a row, P = T k pairs of both, H hidden, I features of an expert on this
rank, E experts.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.experts import Routing
from kernels.interface import AnyKernels
from worker.distributed.communicator import Communicator
from worker.distributed.row_parallel import all_inputs, shared_product, summed
from worker.lora.adapter_weights import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER
from worker.model_config import ExpertsConfig
from worker.weights.model_weights import SparseWeights


class SparseMlp:
    """The experts of one layer."""

    def __init__(self, config: ExpertsConfig, weights: SparseWeights, kernels: AnyKernels) -> None:
        self._routing = Routing(config.top_k, config.renormalize, config.num_experts)
        self._has_shared_gate = config.has_shared_gate
        self._swiglu = config.swiglu
        self._weights = weights
        self._kernels = kernels

    def forward(
        self,
        x_TH: Tensor,
        loras: Sequence[Any] | None,
        group: Communicator,
        shared_TH: Tensor | None = None,
    ) -> Tensor:
        """Return the sum [T, H] over the ranks.

        Args:
            x_TH: the layer's normed rows.
            loras: by fused linear, as the kernels want them; None: no row has an adapter.
            group: of the ranks.
            shared_TH: what the MLP beside the experts returns on this rank, as `row_parallel_part`
                has it, which the sum starts with; None: there is none.
        """
        weights, kernels = self._weights, self._kernels
        router_lora = None if loras is None else loras[ROUTER]
        logits_TE = kernels.linear(x_TH, weights.router, router_lora)
        gates_T1 = None
        if self._has_shared_gate:
            logits_TE, gates_T1 = logits_TE.tensor_split([self._routing.num_experts], dim=1)
        routed = kernels.route(logits_TE, self._routing)
        x_PH = kernels.permute(x_TH, routed)
        gate_up_PI2 = kernels.grouped_linear(x_PH, weights.gate_up, routed)
        if loras is not None:
            kernels.grouped_lora_apply(gate_up_PI2, x_PH, loras[EXPERT_GATE_UP], routed)
        x_PI = self._gate(gate_up_PI2)
        if weights.down.shared is None:
            y_PH = kernels.grouped_linear(x_PI, weights.down, routed)
        else:
            y_PH = shared_product(kernels, x_PI, weights.down, group, routed)
        if loras is not None:
            x_PI = all_inputs(kernels, x_PI, weights.down, group)
            kernels.grouped_lora_apply(y_PH, x_PI, loras[EXPERT_DOWN], routed)
        y_TH = kernels.unpermute(y_PH, routed, shared_TH, gates_T1)
        return summed(y_TH, weights.down, group)

    def _gate(self, gate_up_PI2: Tensor) -> Tensor:
        dtype, swiglu = self._weights.down.dtype, self._swiglu
        if swiglu is None:
            return self._kernels.silu_and_mul(gate_up_PI2, dtype)
        return self._kernels.swigluoai_and_mul(gate_up_PI2, dtype, swiglu.alpha, swiglu.limit)
