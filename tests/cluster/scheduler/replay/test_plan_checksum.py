"""A mark is of the same chain as the ranks check, and tells which field of a plan is another."""

import msgspec
import pytest

from cluster.scheduler.replay.plan_checksum import CHAIN_BYTES, checksum_plan, first_difference
from worker.protocol import (
    GENESIS,
    Chunk,
    PageCopy,
    Plan,
    SamplingParams,
    SequenceStart,
    encode_plan,
)

PLAN = Plan(
    step=7,
    ends=(3, 1),
    starts=(SequenceStart(9, None, SamplingParams(), 3, (5,), 2, ()),),
    chunks=(Chunk(9, 2, (1, 2), (6,), True),) * 20,
    copies=(PageCopy("save", 1, 2, 16),),
)


@pytest.mark.parametrize("plan", [PLAN, Plan(1, (), (), ()), Plan(2**40, (70_000,), (), ())])
def test_the_chain_of_marks_is_the_chain_that_ranks_check(plan: Plan) -> None:
    digest = GENESIS
    for _ in range(2):
        mark, marked = checksum_plan(plan, digest)
        _, digest = encode_plan(plan, digest)
        assert marked == digest
        assert mark.chain == digest[:CHAIN_BYTES]


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", 8), ("ends", (1, 3)), ("starts", ()), ("chunks", PLAN.chunks[1:]), ("copies", ())],
)
def test_the_field_that_differs_is_named(field: str, value: object) -> None:
    other = msgspec.structs.replace(PLAN, **{field: value})
    difference = first_difference(checksum_plan(PLAN, GENESIS)[0], checksum_plan(other, GENESIS)[0])
    assert difference is not None and difference.field == field


def test_every_field_of_a_plan_has_a_mark() -> None:
    assert len(checksum_plan(PLAN, GENESIS)[0].fields) == len(Plan.__struct_fields__) - 1


def test_equal_plans_after_others_differ_in_the_chain_alone() -> None:
    expected, found = (checksum_plan(PLAN, parent)[0] for parent in (GENESIS, b"\x01" * 32))
    difference = first_difference(expected, found)
    assert difference is not None and difference.field == "chain"


def test_a_plan_where_none_was_is_a_difference_and_none_twice_is_not() -> None:
    mark = checksum_plan(PLAN, GENESIS)[0]
    difference = first_difference(None, mark)
    assert difference is not None
    assert (difference.expected, difference.found) == ("no plan", "a plan of step 7")
    assert first_difference(None, None) is None
    assert first_difference(mark, mark) is None
