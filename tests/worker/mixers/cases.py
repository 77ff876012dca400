"""Mixers of random weights beside transformers' own of the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import FalconH1Config, GraniteMoeHybridConfig, Lfm2Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from kernels.recurrent.state_runs import StateRun
from worker.distributed.communicator import Communicator, SingleRank
from worker.mixers.build import MixerLoader, build_mixer
from worker.mixers.config import (
    GatedDeltaConfig,
    Mamba2Config,
    MixerConfig,
    ShortConvConfig,
)
from worker.mixers.mixer import Mixer, MixerContext

HIDDEN = 48
PAGES = 5

Theirs = Any  # a module of transformers
Maker = Callable[[torch.dtype], tuple[Theirs, MixerConfig]]


def lfm2(dtype: torch.dtype, *, has_bias: bool = False) -> tuple[Theirs, MixerConfig]:
    """Return transformers' mixer and what it is."""
    config = Lfm2Config(
        hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], conv_bias=has_bias
    )
    theirs = _filled(Lfm2ShortConv(config, 0), dtype)
    return theirs, ShortConvConfig(HIDDEN, config.conv_L_cache, has_bias)


def lfm2_with_bias(dtype: torch.dtype) -> tuple[Theirs, MixerConfig]:
    return lfm2(dtype, has_bias=True)


def _mamba2(config: Any, *, has_norm: bool, gate_first: bool) -> Mamba2Config:
    return Mamba2Config(
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_size=config.mamba_d_state,
        num_taps=config.mamba_d_conv,
        dt_limit=config.time_step_limit,
        norm_eps=config.rms_norm_eps,
        has_norm=has_norm,
        gate_first=gate_first,
    )


def granite(dtype: torch.dtype) -> tuple[Theirs, MixerConfig]:
    """Return the same of Granite 4, whose b, c and norm are one group's."""
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
    return theirs, _mamba2(config, has_norm=True, gate_first=True)


def falcon(dtype: torch.dtype, *, has_norm: bool = True) -> tuple[Theirs, MixerConfig]:
    """Return the same of Falcon-H1, without its multipliers."""
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
    return theirs, _mamba2(config, has_norm=has_norm, gate_first=False)


def falcon_without_norm(dtype: torch.dtype) -> tuple[Theirs, MixerConfig]:
    return falcon(dtype, has_norm=False)


def qwen(dtype: torch.dtype) -> tuple[Theirs, MixerConfig]:
    """Return the same of Qwen3.5."""
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
    num_taps = config.linear_conv_kernel_dim
    return theirs, GatedDeltaConfig(2, 16, 6, 24, num_taps, config.rms_norm_eps)


MAKERS: tuple[Maker, ...] = (lfm2, lfm2_with_bias, granite, falcon, falcon_without_norm, qwen)


def _filled(module: Any, dtype: torch.dtype) -> Any:
    """Return a module with random weights that leave its outputs about as large as its inputs."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in module.named_parameters():
        scale = weight[0].numel() ** -0.5 if weight.dim() > 1 else 1.0
        offset = 1.0 if name.startswith("norm") else 0.0
        weight.data = offset + scale * torch.randn(weight.shape, generator=generator)
    return module.to(dtype).eval()


def inputs(num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return hidden states [T, H]."""
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)


class OneLayer:
    """A mixer as one kind of device has it, and the pools of its states."""

    def __init__(
        self,
        made: tuple[Theirs, MixerConfig],
        kernels: Any,
        rows_of: Callable[[int, Sequence[StateRun]], Any],
        tp: int = 1,
        group: Communicator | None = None,
    ) -> None:
        self._group = group or SingleRank()
        theirs, config = made
        dtype = theirs.out_proj.weight.dtype
        device = torch.device("cpu")

        prepares = kernels.prepare_linear, kernels.prepare_linear, None
        loader = MixerLoader(config, *prepares, dtype, dtype, device, tp, self._group.rank)
        weights = loader.load({**theirs.state_dict()}.get)
        self.mixer: Mixer = build_mixer(config, loader.part, tp, weights, kernels)
        self.state_shapes = loader.part.state_shapes
        self._rows_of = rows_of

    def pools(self) -> list[Tensor]:
        """Return pools of states in which nothing has been written yet."""
        return [torch.full((PAGES, *shape), torch.nan) for shape in self.state_shapes]

    def context(self, rows: Any, states: Sequence[Tensor]) -> MixerContext:
        """Return the arguments of a call."""
        return MixerContext(rows, states, None, None, self._group)

    @torch.inference_mode()
    def in_chunks(self, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """Return what the mixer makes of one sequence that comes in chunks."""
        states, parts = self.pools(), []
        for start, stop in zip(cuts, cuts[1:], strict=False):
            rows = self._rows_of(stop - start, [StateRun(0, stop - start, 3, is_new=start == 0)])
            y = self.mixer.forward(x[start:stop], self.context(rows, states))
            parts.append(y.clone())
        return torch.cat(parts)
