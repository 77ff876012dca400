"""Our histograms read as Prometheus' own do."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.histogram import (
    CHOICES_BUCKETS,
    COUNT_BUCKETS,
    E2E_BUCKETS,
    ITL_BUCKETS,
    LOAD_BUCKETS,
    PREEMPTIONS_BUCKETS,
    REQUEST_TOKENS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TTFT_BUCKETS,
    WAIT_BUCKETS,
    Histogram,
    regrouped,
)
from cluster.router.metrics.families import histogram

ALL = (
    *(TTFT_BUCKETS, ITL_BUCKETS, E2E_BUCKETS, WAIT_BUCKETS, STEP_BUCKETS, LOAD_BUCKETS),
    *(COUNT_BUCKETS, STEP_TOKENS_BUCKETS, REQUEST_TOKENS_BUCKETS, CHOICES_BUCKETS),
    PREEMPTIONS_BUCKETS,
)


class One(Collector):
    """A registry's single family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


def text_of(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.one_of(st.floats(0, 10_000), st.sampled_from(E2E_BUCKETS)), max_size=20))
def test_the_text_is_that_of_prometheus_own_histogram(values: list[float]) -> None:
    for bounds in ALL:
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        light = Histogram(bounds)
        own = prometheus_client.Histogram(
            "topwork_x_seconds", "Some time.", ["model"], buckets=bounds, registry=theirs
        ).labels('a "b"')
        for value in values:
            light.observe(value)
            own.observe(value)
        family = histogram("x_seconds", "Some time.", bounds, "model")
        ours.register(One(family.histogram([(('a "b"',), light.counts())])))
        assert text_of(ours) == text_of(theirs)


def test_bounds_ascend() -> None:
    for bounds in ALL:
        assert list(bounds) == sorted(set(bounds))


@given(
    st.lists(st.one_of(st.floats(0, 10_000), st.sampled_from(WAIT_BUCKETS)), max_size=20),
    st.sets(st.sampled_from(WAIT_BUCKETS), min_size=1),
)
def test_counts_in_fewer_buckets_are_those_of_a_histogram_that_has_them(
    values: list[float], wanted: set[float]
) -> None:
    bounds = tuple(sorted(wanted))
    fine, coarse = Histogram(WAIT_BUCKETS), Histogram(bounds)
    for value in values:
        fine.observe(value)
        coarse.observe(value)
    assert regrouped(fine.counts(), WAIT_BUCKETS, bounds) == coarse.counts()
