"""What all routers have counted: nothing older ever takes the place of something newer."""

from cluster.histogram import LOAD_BUCKETS, Histogram
from cluster.metrics_hub import KEPT_SECONDS, ClusterCounts, MetricsHub, PoolCounts, RouterCounts

POOL = PoolCounts(1, 2, 3, {"ok": 4}, Histogram(LOAD_BUCKETS).counts())


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def hub_with(clock: Clock, *registered: str) -> MetricsHub:
    return MetricsHub(clock, registered.__contains__, lambda: POOL)


def counts_of(router: str, number: int, in_flight: int = 0) -> RouterCounts:
    return RouterCounts(router, number, {}, {}, {}, in_flight)


def test_reports_are_ordered_by_router_and_know_their_age() -> None:
    clock = Clock()
    hub = hub_with(clock)
    hub.report(counts_of("b", 1), False)
    clock.now = 3.0
    hub.report(counts_of("a", 1), False)
    assert [(r.counts.router, r.age) for r in hub.reports()] == [("a", 0.0), ("b", 3.0)]


def test_a_report_that_was_overtaken_on_its_way_changes_nothing() -> None:
    clock = Clock()
    hub = hub_with(clock)
    hub.report(counts_of("a", 2, in_flight=7), False)
    clock.now = 3.0
    hub.report(counts_of("a", 1, in_flight=5), False)
    (report,) = hub.reports()
    assert (report.counts.number, report.counts.num_in_flight, report.age) == (2, 7, 3.0)


def test_a_router_that_is_gone_stays_for_some_scrapes_and_then_goes() -> None:
    clock = Clock()
    hub = hub_with(clock)
    hub.report(counts_of("dead", 1), False)
    clock.now = KEPT_SECONDS
    hub.report(counts_of("living", 1), False)
    assert [r.counts.router for r in hub.reports()] == ["dead", "living"]
    clock.now += 0.1
    assert [r.counts.router for r in hub.reports()] == ["living"]


def test_a_report_is_answered_with_the_names_to_forget_and_with_everything_only_if_asked() -> None:
    hub = hub_with(Clock(), "kept")
    counts = RouterCounts("a", 1, {}, {}, {"kept": ("kept",), "sum": ("gone", "kept")}, 0)
    assert hub.report(counts, False) == ClusterCounts(("gone",))
    everything = hub.report(counts, True)
    assert everything == ClusterCounts(("gone",), hub.reports(), POOL)
    assert [report.counts for report in everything.routers] == [counts]
