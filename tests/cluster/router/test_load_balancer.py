"""cluster.router.load_balancer: where a request goes, and which replica got which pages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.request import Request
from cluster.router.load_balancer import (
    LOAD_FACTOR,
    Candidate,
    PrefixAffinity,
    choose_replica,
    rendezvous_weight,
)
from worker.protocol import SamplingParams

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

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def request(tokens: tuple[int, ...], adapter: str = "base", salt: str = "") -> Request:
    return Request("r", adapter, tokens, SamplingParams(), 1, cache_salt=salt)


@given(CANDIDATES, st.text(max_size=3), st.data())
def test_the_order_of_the_replicas_decides_nothing(
    candidates: list[Candidate], adapter: str, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert choose_replica(adapter, candidates) == choose_replica(adapter, shuffled)


@given(CANDIDATES, st.text(max_size=3))
def test_a_replica_that_is_much_busier_gets_no_more(
    candidates: list[Candidate], adapter: str
) -> None:
    chosen = choose_replica(adapter, candidates)
    total = sum(candidate.load for candidate in candidates) + 1
    assert chosen.load < LOAD_FACTOR * total / len(candidates)


@given(CANDIDATES, st.text(max_size=3))
def test_of_equal_load_the_prefix_decides_then_the_slot_then_the_home(
    candidates: list[Candidate], adapter: str
) -> None:
    equal = [replace(candidate, load=7) for candidate in candidates]
    chosen = choose_replica(adapter, equal)
    assert chosen.cached_pages == max(one.cached_pages for one in equal)
    rivals = [one for one in equal if one.cached_pages == chosen.cached_pages]
    assert chosen.is_resident == any(one.is_resident for one in rivals)
    rivals = [one for one in rivals if one.is_resident == chosen.is_resident]
    home = max(rendezvous_weight(adapter, one.replica) for one in rivals)
    assert rendezvous_weight(adapter, chosen.replica) == home


@pytest.mark.parametrize(("busy", "goes_to"), [(4, "warm"), (9, "cold")])
def test_a_warm_replica_is_preferred_until_it_is_much_busier(busy: int, goes_to: str) -> None:
    candidates = [Candidate("warm", busy, 5, True), Candidate("cold", 4, 0, False)]
    assert choose_replica("x", candidates).replica == goes_to


@given(st.lists(st.tuples(PROMPTS, st.sampled_from("ab")), max_size=8), PROMPTS)
def test_it_tells_the_longest_run_of_whole_pages_that_each_replica_got(
    sent: list[tuple[tuple[int, ...], str]], prompt: tuple[int, ...]
) -> None:
    prefixes = PrefixAffinity(page_size=2)
    for tokens, replica in sent:
        prefixes.note(prefixes.chain(request(tokens)), replica)

    def common(tokens: tuple[int, ...]) -> int:
        pages = min((len(tokens) - 1) // 2, (len(prompt) - 1) // 2)
        return max(n for n in range(pages + 1) if tokens[: 2 * n] == prompt[: 2 * n])

    expected = {
        replica: max(common(tokens) for tokens, other in sent if other == replica)
        for replica in {replica for _, replica in sent}
    }
    matched = prefixes.matched(prefixes.chain(request(prompt)))
    assert matched == {replica: pages for replica, pages in expected.items() if pages}


def test_adapters_and_salts_share_nothing() -> None:
    prefixes = PrefixAffinity(page_size=2)
    tokens = (1, 2, 3, 4, 5)
    asked = [
        request(tokens),
        request(tokens, "ab"),
        request(tokens, "a", "b"),
        request(tokens, "a"),
    ]
    asked.append(request(tokens, salt="\ud800"))  # JSON may hold half a character
    prefixes.note(prefixes.chain(asked[1]), "x")
    assert [len(prefixes.matched(prefixes.chain(one))) for one in asked] == [0, 1, 0, 0, 0]


def test_a_prompt_is_forgotten_from_its_end_and_the_least_recent_first() -> None:
    prefixes = PrefixAffinity(page_size=1, capacity=4)
    old, new = prefixes.chain(request((1, 2, 3, 0))), prefixes.chain(request((7, 8, 0)))
    prefixes.note(old, "x")
    prefixes.note(new, "y")
    assert len(prefixes) == 4
    assert prefixes.matched(old) == {"x": 2}
    assert prefixes.matched(new) == {"y": 2}


def test_a_replica_that_is_gone_is_forgotten_alone() -> None:
    prefixes = PrefixAffinity(page_size=1)
    both, one = prefixes.chain(request((1, 2, 0))), prefixes.chain(request((5, 6, 0)))
    prefixes.note(both, "x")
    prefixes.note(both, "y")
    prefixes.note(one, "x")
    prefixes.forget("x")
    assert prefixes.matched(both) == {"y": 2}
    assert (prefixes.matched(one), len(prefixes)) == ({}, 2)
