"""Mixers of one rank, made of the tensors of a checkpoint.

Tensors are named as in the mixer's module in transformers, and come whole.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight, Prepare
from kernels.recurrent.weights import prepare_conv, prepare_delta, prepare_scan
from worker.mixers.config import (
    GatedDeltaConfig,
    Mamba2Config,
    MixerConfig,
    MixerPart,
    ShortConvConfig,
)
from worker.mixers.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetShape,
    GatedDeltaNetWeights,
)
from worker.mixers.mamba2 import Mamba2, Mamba2Shape, Mamba2Weights
from worker.mixers.mixer import Mixer
from worker.mixers.short_conv import ShortConv, ShortConvWeights
from worker.spans import Span

Read = Callable[[str], Tensor | None]  # a tensor by its name; None: the module has none such
# Of a whole weight [N, K], the inputs that a rank has, and a whole bias [N].
PrepareShared = Callable[[Tensor, Span, Tensor | None], LinearWeight]
MixerWeights = ShortConvWeights | Mamba2Weights | GatedDeltaNetWeights


class MixerLoader:
    """Makes the weights of the mixers of one rank."""

    def __init__(
        self,
        config: MixerConfig,
        prepare_in: Prepare,
        prepare_out: Prepare,
        prepare_shared: PrepareShared | None,
        dtype: torch.dtype,
        linear_dtype: torch.dtype,
        device: torch.device,
        tp: int = 1,
        rank: int = 0,
    ) -> None:
        """Decide what the rank has.

        Args:
            config: of the model's mixers.
            prepare_in: packs the first product.
            prepare_out: packs the last.
            prepare_shared: packs that if ranks share its inputs, where it is another thing.
            dtype: of norms and biases.
            linear_dtype: in which these are given weights.
            device: of all tensors.
            tp: ranks that share the model.
            rank: one of them.

        Raises:
            ValueError: if `tp` is too large.
        """
        self.part: MixerPart = config.part(tp, rank)
        self._config = config
        self._prepare_in = prepare_in
        self._prepare_out = prepare_out
        self._prepare_shared = prepare_shared
        self._dtype = dtype
        self._linear_dtype = linear_dtype
        self._device = device
        self._tp = tp
        self._rank = rank

    def load(self, read: Read) -> MixerWeights:
        """Return the weights of the mixer of a layer."""
        if isinstance(self._config, ShortConvConfig):
            return self._short_conv(read)
        if isinstance(self._config, Mamba2Config):
            return self._mamba2(self._config, read)
        return self._gated_delta_net(read)

    def _short_conv(self, read: Read) -> ShortConvWeights:
        return ShortConvWeights(
            self._in_proj(read, ("in_proj",)),
            prepare_conv(self._channels(read, "conv.weight"), self._bias(read, "conv.bias")),
            self._out_proj(read),
        )

    def _mamba2(self, config: Mamba2Config, read: Read) -> Mamba2Weights:
        norm = None
        if config.has_norm:
            norm = self._sent(_rows(_there(read, "norm.weight"), [self.part.out_columns]))
        a_log, dt_bias, d = (
            self._own_heads(_there(read, name)) for name in ("A_log", "dt_bias", "D")
        )
        return Mamba2Weights(
            self._in_proj(read, ("in_proj",)),
            prepare_conv(self._channels(read, "conv1d.weight"), self._bias(read, "conv1d.bias")),
            prepare_scan(a_log, dt_bias, d, config.dt_limit),
            norm,
            self._out_proj(read),
        )

    def _gated_delta_net(self, read: Read) -> GatedDeltaNetWeights:
        modules = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        a_log, dt_bias = (self._own_heads(_there(read, name)) for name in ("A_log", "dt_bias"))
        return GatedDeltaNetWeights(
            self._in_proj(read, modules),
            prepare_conv(self._channels(read, "conv1d.weight"), None),
            prepare_delta(a_log, dt_bias),
            self._sent(_there(read, "norm.weight").repeat(len(self.part.heads))),
            self._out_proj(read),
        )

    def _in_proj(self, read: Read, modules: Sequence[str]) -> LinearWeight:
        """Return the first product; what are modules of their own stand one behind the other."""
        whole = [_there(read, f"{module}.weight") for module in modules]
        weight = self._sent_linear(_rows(torch.cat(whole), self.part.in_rows))
        bias = read(f"{modules[0]}.bias")
        own = None if bias is None else self._sent(_rows(bias, self.part.in_rows))
        return self._prepare_in(weight, own)

    def _out_proj(self, read: Read) -> LinearWeight:
        """Return the last product, whose bias one rank of those that are summed adds."""
        columns, shared = self.part.out_columns, self._prepare_shared
        whole = _there(read, "out_proj.weight")
        bias = read("out_proj.bias") if self._rank == 0 or shared is not None else None
        own = None if bias is None else self._sent(bias)
        if shared is not None:
            return shared(self._sent_linear(whole), columns, own)
        weight = whole[:, columns.start : columns.stop].contiguous()
        return self._prepare_out(self._sent_linear(weight), own)

    def _channels(self, read: Read, name: str) -> Tensor:
        return _rows(_there(read, name), self.part.channels).to(self._device)

    def _bias(self, read: Read, name: str) -> Tensor | None:
        bias = read(name)
        return None if bias is None else _rows(bias, self.part.channels).to(self._device)

    def _own_heads(self, of_all: Tensor) -> Tensor:
        return _rows(of_all, [self.part.heads]).to(self._device)

    def _sent(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, self._dtype)

    def _sent_linear(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, self._linear_dtype)


def build_mixer(
    config: MixerConfig, part: MixerPart, tp: int, weights: MixerWeights, kernels: AnyKernels
) -> Mixer:
    """Return the mixer of a layer on one of `tp` ranks, which has `part` of it."""
    if isinstance(weights, ShortConvWeights):
        return ShortConv(weights, kernels)
    if isinstance(config, GatedDeltaConfig):
        assert isinstance(weights, GatedDeltaNetWeights), "weights of another mixer"
        delta = GatedDeltaNetShape(len(part.heads), config.value_dim, config.norm_eps)
        return GatedDeltaNet(delta, weights, kernels)
    assert isinstance(config, Mamba2Config) and isinstance(weights, Mamba2Weights)
    (_, (num_heads, _, head_dim)) = part.state_shapes
    inner = num_heads * head_dim
    shares_norm = config.shares_norm(tp)
    shape = Mamba2Shape(
        num_heads=num_heads,
        head_dim=head_dim,
        norm_group_size=inner if shares_norm else config.inner // config.num_groups,
        all_inner=config.inner if shares_norm else None,
        norm_eps=config.norm_eps,
        gate_first=config.gate_first,
    )
    return Mamba2(shape, weights, kernels)


def _rows(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return a copy of the rows that a rank has."""
    return torch.cat([tensor[span.start : span.stop] for span in spans])


def _there(read: Read, name: str) -> Tensor:
    tensor = read(name)
    assert tensor is not None, f"a mixer has {name}"
    return tensor
