"""The book counts what routers report once, whatever comes twice, late or after a restart."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tenancy.usage import Usage
from cluster.tenancy.usage_book import SavedUsage, UsageBook

DAY = "2026-11-24"


def totals(book: UsageBook) -> dict[str, int]:
    lines = [json.loads(line) for line in book.lines().splitlines()]
    assert {line["date"] for line in lines} <= {book.day}
    return {line["tenant"]: line["requests"] for line in lines}


def test_counts_of_all_routers_are_summed_and_each_report_is_taken_once() -> None:
    book = UsageBook()
    book.turn_to(DAY)
    for _ in range(2):
        book.take_in("one", {"acme": Usage(3, 30, 0, 9)}, DAY)
        book.take_in("two", {"acme": Usage(2, 10, 5, 4), "other": Usage(1)}, DAY)
    assert book.lines().splitlines()[0] == (
        b'{"date":"2026-11-24","tenant":"acme","requests":5,"computed_prompt_tokens":40,'
        b'"cached_prompt_tokens":5,"generation_tokens":13,"adapter_seconds":0.0}'
    )
    assert totals(book) == {"acme": 5, "other": 1}


def test_a_report_that_is_older_than_one_before_adds_nothing() -> None:
    book = UsageBook()
    book.turn_to(DAY)
    book.take_in("r", {"acme": Usage(5)}, DAY)
    book.take_in("r", {"acme": Usage(3)}, DAY)
    book.take_in("r", {"acme": Usage(6)}, DAY)
    assert totals(book) == {"acme": 6}


def test_a_new_day_begins_with_what_is_new() -> None:
    book = UsageBook()
    book.turn_to(DAY)
    book.take_in("r", {"acme": Usage(5)}, DAY)
    book.turn_to("2026-11-25")
    book.take_in("r", {"acme": Usage(7)}, "2026-11-25")
    assert totals(book) == {"acme": 2}
    with pytest.raises(ValueError, match="not of"):
        book.take_in("r", {}, DAY)


def test_a_router_that_was_silent_for_a_day_is_forgotten_at_its_end() -> None:
    book = UsageBook()
    for day in ("2026-11-24", "2026-11-25", "2026-11-26"):
        book.turn_to(day)
        if day == "2026-11-24":
            book.take_in("r", {"acme": Usage(5)}, day)
    assert book.saved(0).seen == {}


def test_without_a_state_what_was_counted_before_is_taken_as_booked() -> None:
    book = UsageBook(is_baseline=True)
    book.turn_to(DAY)
    book.take_in("old", {"acme": Usage(5)}, DAY)
    book.take_in("new", {"acme": Usage(1)}, DAY, has_begun_now=True)
    book.take_in("old", {"acme": Usage(7)}, DAY)
    assert totals(book) == {"acme": 3}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from(["", "save", "crash"]))
    )
)
def test_nothing_counts_twice_or_is_lost_however_often_the_process_ends(
    moves: list[tuple[str, int, str]],
) -> None:
    book, on_disk = UsageBook(), b""
    book.turn_to(DAY)
    counted = dict.fromkeys("abc", 0)
    for router, more, event in moves:
        counted[router] += more
        book.take_in(router, {"acme": Usage(counted[router])}, DAY)
        if event == "save":
            on_disk = msgspec.json.encode(book.saved(0))
        elif event == "crash":
            saved = msgspec.json.decode(on_disk, type=SavedUsage) if on_disk else None
            book = UsageBook(saved)
            if book.day != DAY:
                book.turn_to(DAY)
    for router in "abc":  # they report again
        book.take_in(router, {"acme": Usage(counted[router])}, DAY)
    assert totals(book).get("acme", 0) == sum(counted.values())
