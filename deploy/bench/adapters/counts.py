"""What a server's /metrics says of its adapters, and how that grew.

Owns the reading of the text. Takes every counter whose name begins with `topwork_adapter`, so
that new ones are shown without being named here.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "topwork_adapter"
LOADS = "topwork_adapter_loads_total"
_INSTANCES = ("replica", "router")  # labels that are summed over


@dataclass(frozen=True, slots=True)
class Counts:
    """One look at a server's adapters."""

    totals: dict[str, float]  # counters, by name and labels
    levels: dict[str, int]  # adapters whose best place is there: device, host, disk
    leases: int  # sequences that hold an adapter

    @property
    def loads(self) -> int:
        """Adapters loaded into a slot so far."""
        return int(sum(v for name, v in self.totals.items() if name.partition("{")[0] == LOADS))

    def since(self, before: "Counts") -> dict[str, float]:
        """Return how much each counter has grown."""
        return {name: value - before.totals.get(name, 0.0) for name, value in self.totals.items()}


def read_counts(text: str) -> Counts:
    """Read the text of /metrics."""
    totals: dict[str, float] = defaultdict(float)
    levels: Counter[str] = Counter()
    leases = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter" and sample.name.startswith(PREFIX):
                totals[_key(sample.name, sample.labels)] += sample.value
            elif sample.name == f"{PREFIX}_resident":
                levels[sample.labels["level"]] += int(sample.value)
            elif sample.name == f"{PREFIX}_inflight":
                leases += int(sample.value)
    return Counts(dict(totals), dict(levels), leases)


def _key(name: str, labels: dict[str, str]) -> str:
    kept = [f'{key}="{value}"' for key, value in sorted(labels.items()) if key not in _INSTANCES]
    return f"{name}{{{','.join(kept)}}}" if kept else name
