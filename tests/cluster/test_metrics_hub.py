"""What all routers have counted: nothing older ever takes the place of something newer."""

from cluster.metrics_hub import KEPT_SECONDS, Ledger, RouterCounts


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(router: str, number: int, in_flight: int = 0) -> RouterCounts:
    return RouterCounts(router, number, {}, {}, {}, in_flight)


def test_reports_are_ordered_by_router_and_know_their_age() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.enter(entry("b", 1))
    clock.now = 3.0
    ledger.enter(entry("a", 1))
    assert [(r.counts.router, r.age) for r in ledger.reports()] == [("a", 0.0), ("b", 3.0)]


def test_an_entry_that_was_overtaken_on_its_way_changes_nothing() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.enter(entry("a", 2, in_flight=7))
    clock.now = 3.0
    ledger.enter(entry("a", 1, in_flight=5))
    (report,) = ledger.reports()
    assert (report.counts.number, report.counts.num_in_flight, report.age) == (2, 7, 3.0)


def test_a_router_that_is_gone_stays_for_some_scrapes_and_then_goes() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.enter(entry("dead", 1))
    clock.now = KEPT_SECONDS
    ledger.enter(entry("living", 1))
    assert [r.counts.router for r in ledger.reports()] == ["dead", "living"]
    clock.now += 0.1
    assert [r.counts.router for r in ledger.reports()] == ["living"]
