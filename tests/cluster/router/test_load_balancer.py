"""cluster.router.load_balancer: where a request goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.load_balancer import LOAD_FACTOR, Candidate, affinity, place

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        replica=st.text("abc", min_size=1, max_size=4),
        load=st.integers(0, 40),
        cached_pages=st.integers(0, 3),
        is_resident=st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.replica,
)


@given(CANDIDATES, st.text(max_size=3), st.data())
def test_the_order_of_the_replicas_decides_nothing(
    candidates: list[Candidate], adapter: str, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert place(adapter, candidates) == place(adapter, shuffled)


@given(CANDIDATES, st.text(max_size=3))
def test_nobody_who_is_much_busier_gets_more(candidates: list[Candidate], adapter: str) -> None:
    chosen = place(adapter, candidates)
    total = sum(candidate.load for candidate in candidates) + 1
    assert chosen.load < LOAD_FACTOR * total / len(candidates)


@given(CANDIDATES, st.text(max_size=3))
def test_of_equal_load_the_prefix_decides_then_the_slot_then_the_home(
    candidates: list[Candidate], adapter: str
) -> None:
    equal = [replace(candidate, load=7) for candidate in candidates]
    chosen = place(adapter, equal)
    assert chosen.cached_pages == max(one.cached_pages for one in equal)
    rivals = [one for one in equal if one.cached_pages == chosen.cached_pages]
    assert chosen.is_resident == any(one.is_resident for one in rivals)
    rivals = [one for one in rivals if one.is_resident == chosen.is_resident]
    home = max(affinity(adapter, one.replica) for one in rivals)
    assert affinity(adapter, chosen.replica) == home


@pytest.mark.parametrize(("busy", "goes_to"), [(4, "warm"), (9, "cold")])
def test_a_warm_replica_is_preferred_until_it_is_much_busier(busy: int, goes_to: str) -> None:
    candidates = [Candidate("warm", busy, 5, True), Candidate("cold", 4, 0, False)]
    assert place("x", candidates).replica == goes_to
