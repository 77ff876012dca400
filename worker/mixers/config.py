"""The shapes of mixers, and what of them each rank has. Free of torch: the control plane cuts too.

Ranks share out heads, as they do those of attention, or channels where there are none. What several
heads have in common, a group or a key head, goes with them, and is whole on each of more ranks.
"""

from dataclasses import dataclass
from math import prod

from worker.spans import Span, group_spans, head_spans, total_length

Shape = tuple[int, ...]
STATE_ALIGNMENT = 16  # numbers that a state's place in a page is a multiple of


@dataclass(frozen=True, slots=True)
class MixerPart:
    """What one rank has of the mixer of a layer, in features of the whole."""

    in_rows: tuple[Span, ...]  # of the outputs of its first product, in their order
    channels: tuple[Span, ...]  # of the convolution
    heads: Span  # of a recurrence; none of a mere convolution
    out_columns: Span  # of the inputs of its last product
    state_shapes: tuple[Shape, ...]  # of one page of each state, in float32


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """LFM2's gated short convolution; first product: b, c, x."""

    num_channels: int
    num_taps: int
    has_bias: bool  # also of both products

    @property
    def out_unit(self) -> int:
        """Inputs of the last product that ranks do not divide, or all that they cut in groups."""
        return self.num_channels

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Outputs of each module of the first product."""
        return (3 * self.num_channels,)

    @property
    def tensors(self) -> tuple[tuple[str, Shape], ...]:
        """What a checkpoint has of a mixer besides its linears."""
        taps = ("conv.weight", (self.num_channels, 1, self.num_taps))
        return (taps, ("conv.bias", (self.num_channels,))) if self.has_bias else (taps,)

    def part(self, tp: int, rank: int) -> MixerPart:
        """Return what a rank has.

        Raises:
            ValueError: some rank would have nothing.
        """
        _require(tp <= self.num_channels, tp, f"{self.num_channels} channels")
        own = group_spans(self.num_channels, tp)[rank]
        return MixerPart(
            in_rows=tuple(_behind(own, i * self.num_channels) for i in range(3)),
            channels=(own,),
            heads=Span(0, 0),
            out_columns=own,
            state_shapes=((self.num_taps - 1, len(own)),),
        )


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """A Mamba-2 mixer; first product: gate, x, b, c, dt, of which x, b and c are convolved."""

    num_heads: int
    head_dim: int
    num_groups: int  # of b and c; of as many features is the norm's mean
    state_size: int
    num_taps: int
    dt_limit: tuple[float, float]
    norm_eps: float
    has_norm: bool
    gate_first: bool  # whether the gate comes before the norm
    has_conv_bias: bool = True

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def out_unit(self) -> int:
        """Inputs of the last product that ranks do not divide, or all that they cut in groups."""
        return self.head_dim

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Outputs of each module of the first product."""
        return (self.inner + self.num_channels + self.num_heads,)

    @property
    def tensors(self) -> tuple[tuple[str, Shape], ...]:
        """What a checkpoint has of a mixer besides its linears."""
        per_head = ((name, (self.num_heads,)) for name in ("A_log", "dt_bias", "D"))
        bias = (("conv1d.bias", (self.num_channels,)),) if self.has_conv_bias else ()
        norm = (("norm.weight", (self.inner,)),) if self.has_norm else ()
        return (("conv1d.weight", (self.num_channels, 1, self.num_taps)), *bias, *per_head, *norm)

    def shares_norm(self, tp: int) -> bool:
        """Tell whether a norm goes over features of all ranks."""
        return self.has_norm and tp > self.num_groups

    def part(self, tp: int, rank: int) -> MixerPart:
        """Return what a rank has.

        Raises:
            ValueError: some rank would have nothing, or several norms went over some ranks each.
        """
        can_norm = not self.shares_norm(tp) or self.num_groups == 1
        _require(can_norm, tp, f"norms of {self.num_groups} groups")
        heads, groups = _heads(self.num_heads, self.num_groups, tp, rank)
        x, of_groups = heads.scaled(self.head_dim), groups.scaled(self.state_size)
        b = _behind(of_groups, self.inner)
        c = _behind(b, self.num_groups * self.state_size)
        gate_width = self.inner
        channels = (x, b, c)
        return MixerPart(
            in_rows=(
                x,
                *(_behind(span, gate_width) for span in channels),
                _behind(heads, gate_width + self.num_channels),
            ),
            channels=channels,
            heads=heads,
            out_columns=x,
            state_shapes=(
                (self.num_taps - 1, total_length(channels)),
                (len(heads), self.state_size, self.head_dim),
            ),
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """A gated delta net; first product: q, k, v, z, b, a, of which q, k and v are convolved."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    num_taps: int
    norm_eps: float

    @property
    def num_channels(self) -> int:
        """Of the convolution."""
        values = self.num_value_heads * self.value_dim
        return 2 * self.num_key_heads * self.key_dim + values

    @property
    def out_unit(self) -> int:
        """Inputs of the last product that ranks do not divide, or all that they cut in groups."""
        return self.value_dim

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Outputs of each module of the first product."""
        heads = self.num_value_heads
        return (self.num_channels, heads * self.value_dim, heads, heads)

    @property
    def tensors(self) -> tuple[tuple[str, Shape], ...]:
        """What a checkpoint has of a mixer besides its linears."""
        return (
            ("conv1d.weight", (self.num_channels, 1, self.num_taps)),
            ("A_log", (self.num_value_heads,)),
            ("dt_bias", (self.num_value_heads,)),
            ("norm.weight", (self.value_dim,)),
        )

    def part(self, tp: int, rank: int) -> MixerPart:
        """Return what a rank has.

        Raises:
            ValueError: some rank would have nothing.
        """
        heads, key_heads = _heads(self.num_value_heads, self.num_key_heads, tp, rank)
        keys = self.num_key_heads * self.key_dim
        q, values = key_heads.scaled(self.key_dim), heads.scaled(self.value_dim)
        channels = (q, _behind(q, keys), _behind(values, 2 * keys))
        z_end = self.num_channels + self.num_value_heads * self.value_dim
        return MixerPart(
            in_rows=(
                *channels,
                _behind(values, self.num_channels),
                _behind(heads, z_end),
                _behind(heads, z_end + self.num_value_heads),
            ),
            channels=channels,
            heads=heads,
            out_columns=values,
            state_shapes=(
                (self.num_taps - 1, total_length(channels)),
                (len(heads), self.key_dim, self.value_dim),
            ),
        )


MixerConfig = ShortConvConfig | Mamba2Config | GatedDeltaConfig


def state_bytes(config: MixerConfig, tp: int, rank: int) -> int:
    """Return the bytes of one layer's part of a state page on a rank."""
    return 4 * sum(map(state_size, config.part(tp, rank).state_shapes))


def mixer_bytes(config: MixerConfig, part: MixerPart, item_bytes: int) -> int:
    """Return the bytes of a layer's weights on a rank but its linears.

    Norms take `item_bytes` a number, and all else is float32.
    """
    num_channels, num_heads = total_length(part.channels), len(part.heads)
    if isinstance(config, ShortConvConfig):
        return 4 * num_channels * (config.num_taps + config.has_bias)
    if isinstance(config, GatedDeltaConfig):
        norm = len(part.out_columns) * item_bytes
        return 4 * (num_channels * config.num_taps + 2 * num_heads) + norm
    norm = config.has_norm * len(part.out_columns) * item_bytes
    return 4 * (num_channels * (config.num_taps + config.has_conv_bias) + 3 * num_heads) + norm


def state_size(shape: Shape) -> int:
    """Return the numbers that a state takes in a page, float32 each."""
    return -(-prod(shape) // STATE_ALIGNMENT) * STATE_ALIGNMENT


def _heads(num_heads: int, num_groups: int, tp: int, rank: int) -> tuple[Span, Span]:
    spans = head_spans(num_heads, num_groups, tp)
    each_has = all(len(heads) > 0 for heads, _ in spans)
    _require(each_has, tp, f"{num_heads} heads in {num_groups} groups")
    return spans[rank]


def _behind(span: Span, offset: int) -> Span:
    """Return a span so many features further on."""
    return Span(span.start + offset, span.stop + offset)


def _require(condition: bool, tp: int, what: str) -> None:
    if not condition:
        raise ValueError(f"tensor-parallel size {tp} is too large for a mixer with {what}")
