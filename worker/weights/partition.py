"""Tensor-parallel partition: the slice of every weight that one rank owns.

Pure integers, shared by the weight loader and by the adapter pool, which cuts LoRA shards the same
way. Free of torch: the control plane imports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker.linears import Linear, Unit
from worker.mixers.config import MixerPart
from worker.model_config import ModelConfig
from worker.spans import GROUP, Span, even_spans, group_spans, head_spans, total_length

_WHOLE: tuple[Unit, ...] = ("experts", "shared_gate")  # on all ranks


@dataclass(frozen=True, slots=True)
class Partition:
    """The slices of one rank out of `tp`."""

    rank: int
    tp: int
    head_dim: int
    hidden: int
    q_heads: Span
    kv_heads: Span
    mlp: Span
    vocab: Span
    counts_kv: bool  # no rank before it holds the same KV heads
    expert_mlp: Span  # features of each expert
    linears: tuple[Linear, ...]
    widths: tuple[tuple[Unit, int], ...]  # of each kind of part over all ranks, in features
    by_name: Mapping[str, Linear] = field(compare=False, repr=False)  # `linears`
    in_groups: frozenset[Unit]  # parts that ranks divide between groups of inputs
    # Ranks add up integers, and scale them behind: each has the whole output of a linear whose
    # inputs they share, and so all of an adapter's A there.
    has_exact_sums: bool = False
    mixer: MixerPart | None = None  # of layers that have a mixer
    # Outputs of each module of its first product.
    mixer_rows: Mapping[str, tuple[Span, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    # What `slices` has returned: loads of adapters ask for each module of each layer.
    _known_slices: dict[str, tuple[tuple[Span, ...], Span]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def slices(self, module: str) -> tuple[tuple[Span, ...], Span]:
        """Return (output rows, input columns) of a linear module that this rank holds.

        The rows are one span for each part of the module's outputs, in their order; of query heads
        with gates all gates come first, a span for each head, and then the heads likewise.
        """
        known = self._known_slices.get(module)
        if known is None:
            linear, everything = self.linear(module), Span(0, self.hidden)
            spans = self.mixer_rows.get(module) or self._spans(linear)
            known = (spans, everything) if linear.axis == "column" else ((everything,), spans[0])
            self._known_slices[module] = known
        return known

    def linear(self, module: str) -> Linear:
        """Return what the list of linears says of a module."""
        return self.by_name[module]

    def all_inputs(self, module: str) -> int:
        """Return how many inputs a linear module has over all ranks."""
        linear = self.linear(module)
        return self.hidden if linear.axis == "column" else dict(self.widths)[linear.parts[0]]

    def has_whole_groups(self, module: str) -> bool:
        """Tell whether ranks' inputs of a linear module are whole groups, however many ranks share.

        Unless that would leave some without any, or all have equal shares: then groups are divided
        all the same.
        """
        linear = self.linear(module)
        return linear.axis == "column" or linear.parts[0] in self.in_groups

    def is_summed(self, module: str) -> bool:
        """Tell whether the outputs of a linear module are summed over the ranks."""
        return self.linear(module).axis == "row"

    def adds_bias(self, linear: Linear) -> bool:
        """Tell whether this rank adds a linear's bias, which must enter a sum over ranks once."""
        return linear.axis == "column" or self.rank == 0 or self.has_exact_sums

    def _spans(self, linear: Linear) -> tuple[Span, ...]:
        """Return this rank's features of the axis that ranks divide."""
        dim = self.head_dim
        held: dict[Unit, tuple[Span, ...]] = {
            "q_heads": (self.q_heads.scaled(dim),),
            "gated_q_heads": tuple(
                Span((2 * head + half) * dim, (2 * head + half + 1) * dim)
                for half in (1, 0)
                for head in range(self.q_heads.start, self.q_heads.stop)
            ),
            "kv_heads": (self.kv_heads.scaled(dim),),
            "mlp": (self.mlp,),
            "expert_mlp": (self.expert_mlp,),
        }
        widths = dict(self.widths)
        if self.mixer is not None:
            held["mixer_out"] = (self.mixer.out_columns,)
        for whole in _WHOLE:
            held[whole] = (Span(0, widths[whole]),)
        spans, start = [], 0
        for part in linear.parts:
            spans += [Span(start + span.start, start + span.stop) for span in held[part]]
            start += widths[part]
        return tuple(spans)


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a tensor-parallel size that would leave a rank without a query head.

    Raises:
        ValueError: if `tp` is not between 1 and the number of query heads the layout can feed, or
            is too large for a mixer.
    """
    if tp < 1:
        raise ValueError(f"tensor-parallel size must be at least 1, not {tp}")
    group = config.num_heads // config.num_kv_heads
    if tp > config.num_kv_heads and -(-tp // config.num_kv_heads) > group:
        raise ValueError(
            f"tensor-parallel size {tp} is too large: {config.num_heads} query heads in "
            f"{config.num_kv_heads} groups of {group} can feed at most {config.num_heads} ranks"
        )
    if config.mixer is not None:
        config.mixer.part(tp, 0)


def sums_are_exact(quantization: str | None, *, deterministic: bool) -> bool:
    """Tell whether sums over ranks are of integers, and so do not depend on how many there are."""
    return quantization == "int8" and deterministic


def check_groups(config: ModelConfig, tp: int) -> None:
    """Refuse a tensor-parallel size with which ranks would divide groups of a linear's inputs.

    Raises:
        ValueError: there are fewer groups of some than ranks, or equal shares divide some.
    """
    shared = [linear for linear in config.linears if linear.axis == "row"]
    for part in partitions(config, tp):
        for linear in shared:
            columns = part.slices(linear.name)[1]
            is_divided = any(edge % GROUP for edge in (columns.start, columns.stop))
            if is_divided and part.has_whole_groups(linear.name):
                width = part.all_inputs(linear.name)
                raise ValueError(
                    f"tensor-parallel size {tp} is not possible for --quantization int8 with "
                    f"--deterministic: the {width} inputs of {linear.name} are "
                    f"{width // GROUP} groups of {GROUP}, and ranks would divide some; choose a "
                    f"size that divides {width // GROUP}"
                )


def partition(
    config: ModelConfig, tp: int, rank: int, *, has_exact_sums: bool = False
) -> Partition:
    """Return the slices that `rank` of `tp` holds of a model.

    One rank alone sums nothing, so `has_exact_sums` is only of several.
    """
    check_tp(config, tp)
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    spans = head_spans(config.num_heads, config.num_kv_heads, tp)
    q_heads, kv_heads = spans[rank]
    experts = config.experts
    expert_features = 0 if experts is None else experts.intermediate_size
    return Partition(
        rank=rank,
        tp=tp,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        q_heads=q_heads,
        kv_heads=kv_heads,
        mlp=group_spans(config.intermediate_size, tp)[rank],
        vocab=even_spans(config.vocab_size, tp)[rank],
        counts_kv=rank == 0 or spans[rank - 1][1] != kv_heads,
        expert_mlp=group_spans(expert_features, tp)[rank],
        mixer=None if config.mixer is None else config.mixer.part(tp, rank),
        mixer_rows=_mixer_rows(config, tp, rank),
        linears=config.linears,
        widths=(
            ("q_heads", config.num_heads * config.head_dim),
            ("gated_q_heads", 2 * config.num_heads * config.head_dim),
            ("kv_heads", config.num_kv_heads * config.head_dim),
            ("mlp", config.intermediate_size),
            ("experts", 0 if experts is None else experts.num_experts),
            ("shared_gate", 1),
            ("expert_mlp", expert_features),
            ("mixer_out", 0 if config.mixer is None else len(config.mixer.part(1, 0).out_columns)),
        ),
        by_name={linear.name: linear for linear in config.linears},
        in_groups=_in_groups(config),
        has_exact_sums=has_exact_sums and tp > 1,
    )


def partitions(
    config: ModelConfig, tp: int, *, has_exact_sums: bool = False
) -> tuple[Partition, ...]:
    """Return the slices of all ranks, in rank order."""
    return tuple(partition(config, tp, rank, has_exact_sums=has_exact_sums) for rank in range(tp))


def _in_groups(config: ModelConfig) -> frozenset[Unit]:
    """Return the parts that are divided between groups of inputs, whatever the number of ranks."""
    undivided: dict[Unit, int] = {
        "q_heads": config.head_dim,
        "mlp": config.intermediate_size,
        "expert_mlp": 0 if config.experts is None else config.experts.intermediate_size,
        "mixer_out": 0 if config.mixer is None else config.mixer.out_unit,
    }
    return frozenset(unit for unit, features in undivided.items() if features % GROUP == 0)


def _mixer_rows(config: ModelConfig, tp: int, rank: int) -> dict[str, tuple[Span, ...]]:
    """Return what a rank has of the outputs of each module of a mixer's first product."""
    if config.mixer is None:
        return {}
    own, start = config.mixer.part(tp, rank).in_rows, 0
    modules = [linear.name for linear in config.linears if linear.fused == "mixer_in"]
    rows: dict[str, tuple[Span, ...]] = {}
    for module, width in zip(modules, config.mixer.in_widths, strict=True):
        rows[module] = tuple(
            Span(span.start - start, span.stop - start)
            for span in own
            if start <= span.start < start + width
        )
        start += width
    return rows


def whole_shape(part: Partition, module: str) -> tuple[int, int]:
    """Return the (outputs, inputs) of a linear module, by the one rank that holds everything."""
    assert part.tp == 1, "part of a model"
    rows, columns = part.slices(module)
    return total_length(rows), len(columns)
