"""Our histogram reads as Prometheus' own does."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from cluster.router.histogram import Histogram
from cluster.router.metrics import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS


def text_of(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.one_of(st.floats(0, 10_000), st.sampled_from(E2E_BUCKETS)), max_size=20))
def test_the_text_is_that_of_prometheus_own_histogram(values: list[float]) -> None:
    for bounds in (TTFT_BUCKETS, ITL_BUCKETS, E2E_BUCKETS):
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        light = Histogram("x_seconds", "Some time.", ("model", 'a "b"'), bounds, ours)
        own = prometheus_client.Histogram(
            "x_seconds", "Some time.", ["model"], buckets=bounds, registry=theirs
        )
        for value in values:
            light.observe(value)
            own.labels('a "b"').observe(value)
        assert text_of(ours) == text_of(theirs)
