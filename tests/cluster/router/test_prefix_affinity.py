"""cluster.router.prefix_affinity: which replica got which leading pages."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import Request
from cluster.router.prefix_affinity import PrefixAffinity
from worker.protocol import SamplingParams

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)


def request(tokens: tuple[int, ...], adapter: str = "base", salt: str = "") -> Request:
    return Request("r", adapter, tokens, SamplingParams(), 1, cache_salt=salt)


@given(st.lists(st.tuples(PROMPTS, st.sampled_from("ab")), max_size=8), PROMPTS)
def test_it_tells_the_longest_run_of_whole_pages_that_each_replica_got(
    sent: list[tuple[tuple[int, ...], str]], prompt: tuple[int, ...]
) -> None:
    memory = PrefixAffinity(page_size=2)
    for tokens, replica in sent:
        memory.note(memory.chain(request(tokens)), replica)

    def common(tokens: tuple[int, ...]) -> int:
        pages = min((len(tokens) - 1) // 2, (len(prompt) - 1) // 2)
        return max(n for n in range(pages + 1) if tokens[: 2 * n] == prompt[: 2 * n])

    expected = {
        replica: max(common(tokens) for tokens, other in sent if other == replica)
        for replica in {replica for _, replica in sent}
    }
    matched = memory.matched(memory.chain(request(prompt)))
    assert matched == {replica: pages for replica, pages in expected.items() if pages}


def test_adapters_and_salts_share_nothing() -> None:
    memory = PrefixAffinity(page_size=2)
    tokens = (1, 2, 3, 4, 5)
    asked = [
        request(tokens),
        request(tokens, "ab"),
        request(tokens, "a", "b"),
        request(tokens, "a"),
    ]
    asked.append(request(tokens, salt="\ud800"))  # JSON may hold half a character
    memory.note(memory.chain(asked[1]), "x")
    assert [len(memory.matched(memory.chain(one))) for one in asked] == [0, 1, 0, 0, 0]


def test_a_prompt_is_forgotten_from_its_end_and_the_least_recent_first() -> None:
    memory = PrefixAffinity(page_size=1, capacity=4)
    old, new = memory.chain(request((1, 2, 3, 0))), memory.chain(request((7, 8, 0)))
    memory.note(old, "x")
    memory.note(new, "y")
    assert len(memory) == 4
    assert memory.matched(old) == {"x": 2}
    assert memory.matched(new) == {"y": 2}


def test_a_replica_that_is_gone_is_forgotten_alone() -> None:
    memory = PrefixAffinity(page_size=1)
    both, one = memory.chain(request((1, 2, 0))), memory.chain(request((5, 6, 0)))
    memory.note(both, "x")
    memory.note(both, "y")
    memory.note(one, "x")
    memory.forget("x")
    assert memory.matched(both) == {"y": 2}
    assert (memory.matched(one), len(memory)) == ({}, 2)
