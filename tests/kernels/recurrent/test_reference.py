"""kernels.recurrent.reference: what it says is what transformers computes."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.falcon_h1.modeling_falcon_h1 import (
    FalconH1RMSNormGated,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn, causal_conv1d_update
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from kernels.recurrent import reference
from kernels.recurrent.weights import prepare_conv
from tests.kernels.recurrent.cases import error, randn

LENGTH = 70  # more than one chunk of 64


@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_is_that_of_transformers(num_taps: int, *, has_bias: bool) -> None:
    weight, x = randn(40, 1, num_taps, seed=1), randn(LENGTH, 40, seed=2)
    bias = randn(40, seed=3) if has_bias else None
    prepared = prepare_conv(weight, bias)
    y, state = reference.causal_conv(x, prepared.taps, prepared.bias, None)
    theirs = causal_conv1d_fn(x.T.unsqueeze(0), weight.squeeze(1), bias)[0].T
    assert error(y, theirs.double()) < 1e-6
    their_state = x[-(num_taps - 1) :].T.unsqueeze(0).clone()
    token = randn(1, 40, seed=4)
    y, state = reference.causal_conv(token, prepared.taps, prepared.bias, state)
    theirs = causal_conv1d_update(token.unsqueeze(2), their_state, weight.squeeze(1), bias)
    assert error(y, theirs[..., 0].double()) < 1e-6
    assert torch.equal(state, their_state[0].T)


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.2, 1.0)])
def test_a_scan_is_that_of_transformers(dt_limit: tuple[float, float]) -> None:
    x, dt = randn(LENGTH, 6, 8, seed=1), randn(LENGTH, 6, seed=2)
    b, c = randn(LENGTH, 2, 5, seed=3), randn(LENGTH, 2, 5, seed=4)
    a, dt_bias, d = -randn(6, seed=5).exp(), randn(6, seed=6), randn(6, seed=7)
    y, state = reference.selective_scan(x, b, c, dt, a, dt_bias, d, dt_limit, None)
    batch = [part.unsqueeze(0) for part in (x, dt, b, c)]
    theirs, their_state = mamba2_chunk_scan(
        *batch[:2],
        a,
        *batch[2:],
        chunk_size=16,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    assert error(y, theirs[0].double()) < 1e-5
    assert error(state, their_state[0].transpose(1, 2).double()) < 1e-5


def test_a_scan_of_one_row_is_that_of_transformers() -> None:
    x, dt = randn(1, 6, 8, seed=1), randn(1, 6, seed=2)
    b, c = randn(1, 2, 5, seed=3), randn(1, 2, 5, seed=4)
    a, dt_bias, d = -randn(6, seed=5).exp(), randn(6, seed=6), randn(6, seed=7)
    before = randn(6, 5, 8, seed=8)
    limit = (0.0, float("inf"))
    y, state = reference.selective_scan(x, b, c, dt, a, dt_bias, d, limit, before)
    their_state = before.transpose(1, 2).unsqueeze(0).clone()
    theirs = mamba2_selective_state_update(
        their_state,
        x,
        dt.unsqueeze(2).expand(-1, -1, 8),
        a[:, None, None].expand(-1, 8, 5),
        b,
        c,
        d[:, None].expand(-1, 8),
        dt_bias=dt_bias[:, None].expand(-1, 8),
        dt_softplus=True,
    )
    assert error(y, theirs.double()) < 1e-5
    assert error(state, their_state[0].transpose(1, 2).double()) < 1e-5


@pytest.mark.parametrize("rule", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_a_gated_delta_rule_is_that_of_transformers(rule: object) -> None:
    assert callable(rule)
    q, k = randn(LENGTH, 2, 16, seed=1), randn(LENGTH, 2, 16, seed=2)
    v, b, before = randn(LENGTH, 6, 8, seed=3), randn(LENGTH, 6, seed=4), randn(6, 16, 8, seed=5)
    log_decay = -F.softplus(randn(LENGTH, 6, seed=6))
    y, state = reference.gated_delta_rule(q, k, v, log_decay.exp(), b.sigmoid(), before)
    theirs, their_state = rule(
        *(part.unsqueeze(0) for part in (q, k, v)),
        g=log_decay.unsqueeze(0),
        beta=b.sigmoid().unsqueeze(0),
        initial_state=before.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert error(y, theirs[0].double()) < 1e-5
    assert error(state, their_state[0].double()) < 1e-5


@torch.no_grad()
def test_gated_norms_are_those_of_transformers() -> None:
    x, gate, weight = randn(9, 40, seed=1), randn(9, 40, seed=2), randn(40, seed=3)

    def ours(group_size: int, weight: torch.Tensor, *, gate_first: bool) -> torch.Tensor:
        return reference.gated_norm(x, gate, weight, group_size, 1e-5, gate_first=gate_first)

    granite = GraniteMoeHybridRMSNormGated(40, group_size=20, eps=1e-5)
    granite.weight.data = weight
    assert error(ours(20, weight, gate_first=True), granite(x, gate).double()) < 1e-6
    for gate_first in (True, False):
        falcon = FalconH1RMSNormGated(40, 1e-5, n_groups=4, norm_before_gate=not gate_first)
        falcon.weight.data = weight
        right = falcon(x, gate).double()
        assert error(ours(10, weight, gate_first=gate_first), right) < 1e-6
    qwen = Qwen3_5RMSNormGated(8, eps=1e-5)
    qwen.weight.data = weight[:8]
    right = qwen(x.view(-1, 8), gate.view(-1, 8)).view(9, 40).double()
    assert error(ours(8, weight[:8].repeat(5), gate_first=False), right) < 1e-6
