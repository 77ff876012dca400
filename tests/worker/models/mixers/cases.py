"""Mixers of random weights beside transformers' own of the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import FalconH1Config, GraniteMoeHybridConfig, Lfm2Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from kernels.interface import AnyKernels
from kernels.recurrent.state_runs import StateRun
from kernels.recurrent.weights import prepare_conv, prepare_delta, prepare_scan
from worker.distributed.communicator import SingleRank
from worker.models.mixers.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetShape,
    GatedDeltaNetWeights,
)
from worker.models.mixers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from worker.models.mixers.mixer import Mixer, MixerContext
from worker.models.mixers.short_conv import ShortConv, ShortConvWeights

HIDDEN = 48
PAGES = 5


def lfm2(kernels: AnyKernels, dtype: torch.dtype) -> tuple[nn.Module, Mixer]:
    config = Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"])
    theirs = _filled(Lfm2ShortConv(config, 0), dtype)
    weights = ShortConvWeights(
        kernels.prepare_linear(theirs.in_proj.weight.data.clone()),
        prepare_conv(theirs.conv.weight.data, None),
        kernels.prepare_linear(theirs.out_proj.weight.data.clone()),
    )
    return theirs, ShortConv(weights, kernels)


def _mamba2(theirs: Any, config: Any, gate_first: bool, kernels: AnyKernels) -> Mamba2:
    groups, inner = config.mamba_n_groups, theirs.intermediate_size
    shape = Mamba2Shape(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=groups,
        state_size=config.mamba_d_state,
        norm_group_size=inner // groups,
        norm_eps=config.rms_norm_eps,
        gate_first=gate_first,
    )
    norm = getattr(theirs.norm, "weight", None)
    weights = Mamba2Weights(
        kernels.prepare_linear(theirs.in_proj.weight.data.clone()),
        prepare_conv(theirs.conv1d.weight.data, theirs.conv1d.bias.data),
        prepare_scan(
            theirs.A_log.data, theirs.dt_bias.data, theirs.D.data, (0.0, float("inf"))
        ),
        None if norm is None else norm.data,
        kernels.prepare_linear(theirs.out_proj.weight.data.clone()),
    )
    return Mamba2(shape, weights, kernels)


def granite(kernels: AnyKernels, dtype: torch.dtype) -> tuple[nn.Module, Mixer]:
    config = GraniteMoeHybridConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["mamba"],
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    )
    theirs = _filled(GraniteMoeHybridMambaLayer(config, 0), dtype)
    return theirs, _mamba2(theirs, config, True, kernels)


def falcon(
    kernels: AnyKernels, dtype: torch.dtype, *, has_norm: bool = True
) -> tuple[nn.Module, Mixer]:
    config = FalconH1Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=24,
        mamba_n_groups=2,
        mamba_chunk_size=8,
        mamba_rms_norm=has_norm,
        mamba_norm_before_gate=True,
    )
    theirs = FalconH1Mixer(config, 0)
    theirs.mup_vector = torch.ones(1)
    theirs = _filled(theirs, dtype)
    return theirs, _mamba2(theirs, config, False, kernels)


def falcon_without_norm(kernels: AnyKernels, dtype: torch.dtype) -> tuple[nn.Module, Mixer]:
    return falcon(kernels, dtype, has_norm=False)


def qwen(kernels: AnyKernels, dtype: torch.dtype) -> tuple[nn.Module, Mixer]:
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    )
    theirs = _filled(Qwen3_5GatedDeltaNet(config, 0), dtype)
    shape = GatedDeltaNetShape(2, 16, 6, 24, config.rms_norm_eps)
    parts = theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a
    weights = GatedDeltaNetWeights(
        kernels.prepare_linear(torch.cat([part.weight.data for part in parts])),
        prepare_conv(theirs.conv1d.weight.data, None),
        prepare_delta(theirs.A_log.data, theirs.dt_bias.data),
        theirs.norm.weight.data.repeat(6),
        kernels.prepare_linear(theirs.out_proj.weight.data.clone()),
    )
    return theirs, GatedDeltaNet(shape, weights, kernels)


def _filled(module: Any, dtype: torch.dtype) -> Any:
    """Return a module with random weights that leave its outputs about as large as its inputs."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        scale = weight[0].numel() ** -0.5 if weight.dim() > 1 else 1.0
        offset = 1.0 if name.startswith("norm") else 0.0
        weight.data = offset + scale * torch.randn(weight.shape, generator=generator)
    return module.to(dtype).eval()


MAKERS: tuple[Callable[[AnyKernels, torch.dtype], tuple[nn.Module, Mixer]], ...] = (
    lfm2,
    granite,
    falcon,
    falcon_without_norm,
    qwen,
)


def inputs(num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return hidden states [T, H]."""
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)


def pools(mixer: Mixer) -> list[Tensor]:
    """Return pools of states in which nothing has been written yet."""
    return [torch.full((PAGES, *shape), torch.nan) for shape in mixer.state_shapes]


def in_chunks(
    mixer: Mixer,
    x: Tensor,
    cuts: Sequence[int],
    rows_of: Callable[[int, Sequence[StateRun]], Any],
) -> Tensor:
    """Return what a mixer makes of one sequence that comes in chunks."""
    states, parts = pools(mixer), []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        rows = rows_of(stop - start, [StateRun(0, stop - start, 3, is_new=start == 0)])
        context = MixerContext(rows, states, None, None, SingleRank())
        parts.append(mixer.forward(x[start:stop], context).clone())
    return torch.cat(parts)
