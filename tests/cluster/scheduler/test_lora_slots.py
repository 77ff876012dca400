"""Adapters in slots."""

import pytest

from cluster.scheduler.lora_slots import SlotTable


def occupied(table: SlotTable, *digests: str) -> None:
    for step, digest in enumerate(digests, start=1):
        table.reserve(digest, 0, step)
        table.loaded(digest, 0)


def test_the_smallest_free_slot_comes_first() -> None:
    table = SlotTable(3)
    occupied(table, "A", "B", "C")
    table.free("C", 9)
    table.free("A", 9)
    assert [table.reserve("D", 0, 4), table.reserve("E", 0, 4)] == [0, 2]
    table.check()


def test_idle_adapters_go_by_last_use_then_slot() -> None:
    table = SlotTable(4)
    for digest in "ABCD":
        table.reserve(digest, 0, 1)
        table.loaded(digest, 0)
    table.lease("A", 2)
    table.release("A", 9)
    table.lease("C", 3)
    assert [r.adapter for r in table.idle()] == ["B", "D", "A"]
    table.release("C", 4)
    assert [r.adapter for r in table.idle()] == ["B", "D", "C", "A"]
    table.check()


def test_loading_leased_and_pinned_adapters_are_no_victims() -> None:
    table = SlotTable(4)
    occupied(table, "A", "B", "C")
    table.reserve("D", 0, 1)
    table.lease("A", 2)
    table.pin("B", 0)
    assert [r.adapter for r in table.idle()] == ["C"]
    table.unpin("B")
    assert [r.adapter for r in table.idle()] == ["B", "C"]
    table.check()


def test_an_adapter_pinned_before_it_has_a_slot_is_pinned_when_it_comes() -> None:
    table = SlotTable(2)
    table.pin("A", 0)
    occupied(table, "A", "B")
    assert [r.adapter for r in table.idle()] == ["B"]


def test_a_lease_cannot_be_released_twice_nor_a_leased_adapter_freed() -> None:
    table = SlotTable(1)
    occupied(table, "A")
    table.lease("A", 2)
    with pytest.raises(AssertionError, match="under its sequences"):
        table.free("A", 9)
    table.release("A", 3)
    with pytest.raises(AssertionError, match="more often"):
        table.release("A", 3)


def test_a_loading_adapter_cannot_be_leased() -> None:
    table = SlotTable(1)
    table.reserve("A", 0, 1)
    with pytest.raises(AssertionError, match="not ready"):
        table.lease("A", 1)
