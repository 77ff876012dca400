"""What a server counts of its adapters and how that grew, and where its adapters are.

Owns the reading of /metrics and GET /v1/adapters. Takes every counter whose name begins with
`topwork_adapter`, so that new ones are shown without being named here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "topwork_adapter"
LOADS = "topwork_adapter_loads_total"
_INSTANCES = ("replica", "router")  # labels that are summed over


@dataclass(frozen=True, slots=True)
class Counts:
    """One look at the counters of adapters."""

    totals: dict[str, float]  # by name and labels

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
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter" and sample.name.startswith(PREFIX):
                totals[_key(sample.name, sample.labels)] += sample.value
    return Counts(dict(totals))


def count_tiers(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many entries of GET /v1/adapters are in each tier; /metrics names only some."""
    return dict(Counter(entry["tier"] for entry in entries))


def _key(name: str, labels: dict[str, str]) -> str:
    kept = [f'{key}="{value}"' for key, value in sorted(labels.items()) if key not in _INSTANCES]
    return f"{name}{{{','.join(kept)}}}" if kept else name
