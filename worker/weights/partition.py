"""Tensor-parallel partition: the slice of every weight that one rank owns.

Pure integers, shared by the weight loader and by the adapter pool, which cuts LoRA shards the same
way. Free of torch: the control plane imports it.
"""

from dataclasses import dataclass

from worker.model_config import ModelConfig

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
LINEAR_MODULES = (*COLUMN_PARALLEL, *ROW_PARALLEL)


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range [start, stop) of one axis."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> "Span":
        """Return the span counted in units `factor` times smaller (heads to features)."""
        return Span(self.start * factor, self.stop * factor)


def even_spans(total: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, total) into `parts` contiguous spans whose lengths differ by at most one."""
    bounds = [(total * i + parts - 1) // parts for i in range(parts + 1)]
    return tuple(Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def _head_spans(num_heads: int, num_kv_heads: int, tp: int) -> tuple[tuple[Span, Span], ...]:
    """Return (query heads, KV heads) of each rank.

    With at most as many ranks as KV heads, whole groups (one KV head and its query heads) are dealt
    out in contiguous runs. With more ranks, every KV head is replicated on a run of ranks, which
    share its query heads. Either way each rank's query heads are spread evenly over its KV heads.
    """
    group = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        return tuple((kv.scaled(group), kv) for kv in even_spans(num_kv_heads, tp))
    spans: list[tuple[Span, Span]] = []
    for kv_head, ranks in enumerate(even_spans(tp, num_kv_heads)):
        for queries in even_spans(group, len(ranks)):
            start = kv_head * group
            spans.append(
                (Span(start + queries.start, start + queries.stop), Span(kv_head, kv_head + 1))
            )
    return tuple(spans)


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

    def slices(self, module: str) -> tuple[Span, Span]:
        """Return (output rows, input columns) of a linear module that this rank holds."""
        everything = Span(0, self.hidden)
        match module:
            case "q_proj":
                return self.q_heads.scaled(self.head_dim), everything
            case "k_proj" | "v_proj":
                return self.kv_heads.scaled(self.head_dim), everything
            case "o_proj":
                return everything, self.q_heads.scaled(self.head_dim)
            case "gate_proj" | "up_proj":
                return self.mlp, everything
            case "down_proj":
                return everything, self.mlp
        raise AssertionError(f"not a linear module: {module}")


def check_tp(config: ModelConfig, tp: int) -> None:
    """Refuse a tensor-parallel size that would leave a rank without a query head.

    Raises:
        ValueError: if `tp` is not between 1 and the number of query heads the layout can feed.
    """
    if tp < 1:
        raise ValueError(f"tensor-parallel size must be at least 1, not {tp}")
    group = config.num_heads // config.num_kv_heads
    if tp > config.num_kv_heads and -(-tp // config.num_kv_heads) > group:
        raise ValueError(
            f"tensor-parallel size {tp} is too large: {config.num_heads} query heads in "
            f"{config.num_kv_heads} groups of {group} can feed at most {config.num_heads} ranks"
        )


def partition(config: ModelConfig, tp: int, rank: int) -> Partition:
    """Return the slices that `rank` of `tp` holds of a model."""
    check_tp(config, tp)
    assert 0 <= rank < tp, f"rank {rank} of {tp}"
    q_heads, kv_heads = _head_spans(config.num_heads, config.num_kv_heads, tp)[rank]
    return Partition(
        rank=rank,
        tp=tp,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        q_heads=q_heads,
        kv_heads=kv_heads,
        mlp=even_spans(config.intermediate_size, tp)[rank],
        vocab=even_spans(config.vocab_size, tp)[rank],
    )


def module_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return the full (output features, input features) of a linear module."""
    rows, columns = partition(config, 1, 0).slices(module)
    return len(rows), len(columns)
