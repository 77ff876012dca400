"""A histogram that costs next to nothing until somebody looks at it.

Owns the counts of one series; is read through a registry as Prometheus' own histograms are. Belongs
to one event loop. Knows nothing of what is measured.
"""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram(Collector):
    """Counts values by buckets, under one label; without values it has no series."""

    def __init__(
        self,
        name: str,
        text: str,
        label: tuple[str, str],
        bounds: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last one has no bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound is within it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Give the series as they are now."""
        name, value = self._label
        family = HistogramMetricFamily(self._name, self._text, labels=[name])
        if any(self._counts):
            count, buckets = 0, []
            for bound, more in zip((*self._bounds, float("inf")), self._counts, strict=True):
                count += more
                buckets.append((str(bound) if bound < float("inf") else "+Inf", count))
            family.add_metric([value], buckets, self._sum)
        yield family
