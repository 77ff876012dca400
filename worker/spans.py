"""Ranges of features, and how they are dealt out to ranks.

Pure integers. Free of torch: the control plane imports it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GROUP = 32  # features that are quantized together


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


def total_length(spans: Sequence[Span]) -> int:
    """Return how long spans are together."""
    return sum(map(len, spans))


def even_spans(total: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, total) into `parts` contiguous spans whose lengths differ by at most one."""
    bounds = [(total * i + parts - 1) // parts for i in range(parts + 1)]
    return tuple(Span(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


def group_spans(total: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, total) likewise, but into whole groups where it consists of as many or more.

    What divides evenly is divided evenly all the same: on GPUs the sums of ranks that have equal
    shares are branches of one tree (`kernels/gpu/batch_invariant/`).
    """
    if total % parts == 0 or total % GROUP or total // GROUP < parts:
        return even_spans(total, parts)
    return tuple(span.scaled(GROUP) for span in even_spans(total // GROUP, parts))


def head_spans(num_heads: int, num_kv_heads: int, tp: int) -> tuple[tuple[Span, Span], ...]:
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
