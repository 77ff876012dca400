"""What a metric is called, what it counts and by which labels: one entry for each.

Owns the way from such an entry and some values to what Prometheus' client writes out. Base units
alone; the prefix is added here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from cluster.histogram import HistogramCounts

PREFIX = "topwork_"
LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; `bounds` make it a histogram."""

    name: str  # without prefix and without the _total of counters
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def metric(self, values: Iterable[tuple[LabelValues, float]]) -> Metric:
        """Return the series of a counter or gauge."""
        assert self.kind != "histogram", f"{self.name} is a histogram"
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(f"{PREFIX}{self.name}", self.text, labels=self.labels)
        for label_values, value in values:
            family.add_metric(label_values, float(value))
        return family

    def histogram(self, values: Iterable[tuple[LabelValues, HistogramCounts]]) -> Metric:
        """Return the series of a histogram; one that has no values yet is all zeros."""
        assert self.kind == "histogram", f"{self.name} is a {self.kind}"
        family = HistogramMetricFamily(f"{PREFIX}{self.name}", self.text, labels=self.labels)
        for label_values, counted in values:
            family.add_metric(label_values, list(counted.cumulated(self.bounds)), counted.total)
        return family


def counter(name: str, text: str, *labels: str) -> Family:
    """Return the entry of a counter."""
    return Family(name, "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    """Return the entry of a gauge."""
    return Family(name, "gauge", text, labels)


def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Family:
    """Return the entry of a histogram."""
    return Family(name, "histogram", text, labels, bounds)
