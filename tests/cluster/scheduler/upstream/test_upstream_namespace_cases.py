"""What other engines test of whose pages are whose, told of our namespaces and names of pages.

Each test names the case that it is.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.kv_cache.events import page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import namespace
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.adapters.tiny import tiny_adapter
from tests.cluster.scheduler.picture import forget, found, observed, remember, visit

MakeEngine = Callable[..., FakeEngine]

PROMPT = tuple(range(13))
BASE_SPACE = namespace("m", BASE, "")
A_SPACE = namespace("m", "A", "")
B_SPACE = namespace("m", "B", "")

texts = st.text(alphabet="ab\0", max_size=6)


def test_every_page_of_an_adapter_bears_its_mark_and_no_page_of_the_base_model_does() -> None:
    """Case 1 (vLLM)."""
    engine, picture = observed()
    for adapter in ("A", BASE):
        engine.add(PROMPT, 1, adapter)
        engine.run()
    marked, plain = picture.names("A"), picture.names(BASE)
    assert len(marked) == len(plain) == 3
    assert all(a != b for a, b in zip(marked, plain, strict=True))
    assert {space.adapter for space, *_ in picture.stores} == {"A", BASE}


def test_an_adapter_and_a_salt_that_reads_like_it_share_nothing(make_engine: MakeEngine) -> None:
    """Case 2 (vLLM)."""
    engine = make_engine(num_slots=3)
    for adapter, salt in (("x", ""), (BASE, "x"), ("x", "x"), ("xx", ""), (BASE, "")):
        engine.add(PROMPT, 1, adapter, salt=salt)
        engine.run()
    assert [engine.num_cached_tokens(seq_id) for seq_id in range(1, 6)] == [0] * 5


@given(texts, st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2))
def test_no_two_ways_to_cut_a_text_in_three_make_the_same_namespace(
    text: str, cuts: list[tuple[int, int]]
) -> None:
    """Case 2 (vLLM), for any spelling."""
    parts = {(text[: min(cut)], text[min(cut) : max(cut)], text[max(cut) :]) for cut in cuts}
    assert len({namespace(*part).key for part in parts}) == len(parts)


def test_new_bytes_under_an_old_name_find_nothing_and_the_old_bytes_elsewhere_find_all(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """Case 3 (vLLM)."""
    first = tiny_adapter("q_proj", seed=1).read(tmp_path / "mine").digest
    other = tiny_adapter("q_proj", seed=2).read(tmp_path / "mine").digest  # written over it
    moved = tiny_adapter("q_proj", seed=1).read(tmp_path / "yours").digest
    engine = make_engine()
    for digest in (first, other, moved):
        engine.add(PROMPT, 1, digest)
        engine.run()
    assert [engine.num_cached_tokens(seq_id) for seq_id in (1, 2, 3)] == [0, 0, 12]


def test_every_event_names_the_adapter_also_for_pages_behind_known_ones() -> None:
    """Case 4 (vLLM)."""
    engine, picture = observed(num_pages=10, num_host_pages=10, max_model_len=40)
    for length in (9, 21, 29):  # each goes on where the one before it ended
        engine.add(tuple(range(length)), 1, "A")
        engine.run()
    engine.add(tuple(range(500, 537)), 1)  # and drives it to the host
    engine.run()
    engine.add(tuple(range(29)), 1, "A")
    engine.run()
    told = [(space, len(names)) for space, _, names, _ in picture.stores if space.adapter == "A"]
    assert {space for space, _ in told} == {namespace("model", "A", "")}
    num_computed, num_moved = 7, 7 + 7  # to the host and back
    assert sum(count for _, count in told) >= num_computed + num_moved
    assert {space.adapter for space, *_ in picture.removals} == {"A", BASE}


def test_two_salts_never_share_and_one_salt_shares(make_engine: MakeEngine) -> None:
    """Case 8 (vLLM)."""
    engine = make_engine()
    for adapter in (BASE, "A"):
        for salt in ("one", "two", "one", ""):
            engine.add(PROMPT, 1, adapter, salt=salt)
            engine.run()
    cached = [engine.num_cached_tokens(seq_id) for seq_id in range(1, 9)]
    assert cached == [0, 0, 12, 0] * 2


@pytest.mark.parametrize(
    ("first", "second", "num_found"),
    [("A", "A", 3), ("A", "B", 0), ("A", BASE, 0), (BASE, "A", 0), (BASE, BASE, 3)],
)
def test_a_prefix_is_found_by_the_same_adapter_and_by_no_other(
    first: str, second: str, num_found: int
) -> None:
    """Case 42 (tokenspeed), reuse."""
    cache = PrefixCache(8)
    visit(cache, namespace("m", first, ""), "abc", 1)
    assert found(cache, namespace("m", second, ""), "abcd") == num_found


def test_where_a_sequence_ends_up_is_in_the_tree_of_its_adapter() -> None:
    """Case 42 (tokenspeed), the node that was inserted last."""
    cache = PrefixCache(12)
    visit(cache, BASE_SPACE, "abcd", 1)
    node = remember(cache, A_SPACE, "ab", 2)
    for step, word in ((3, "c"), (4, "d")):
        node, refused = cache.insert(node, [(ord(word),)], cache.allocate(1), step)
        assert refused == [] and node.tree.namespace == A_SPACE
    assert [above.tree.namespace for above in node.path()] == [A_SPACE] * 4
    assert found(cache, A_SPACE, "abcd") == 4
    cache.check([])


def test_eviction_in_one_namespace_takes_nothing_from_another() -> None:
    """Case 42 (tokenspeed), eviction."""
    cache = PrefixCache(9)
    for step, space in enumerate((A_SPACE, BASE_SPACE, B_SPACE), start=1):
        visit(cache, space, "abc", step)
    lengths = []
    for num_free in range(1, 10):
        forget(cache, num_free)
        lengths.append(tuple(found(cache, s, "abc") for s in (A_SPACE, BASE_SPACE, B_SPACE)))
    assert lengths[2] == (0, 3, 3)
    assert lengths[5] == (0, 0, 3)
    assert lengths[8] == (0, 0, 0)


@pytest.mark.parametrize("num_host_pages", [0, 2])
def test_an_adapter_is_forgotten_at_once_and_forgetting_it_again_does_nothing(
    num_host_pages: int,
) -> None:
    """Case 42 (tokenspeed), dropping a namespace."""
    cache = PrefixCache(8, num_host_pages)
    for space in (A_SPACE, namespace("m", "A", "salt"), BASE_SPACE):
        visit(cache, space, "ab", 1)
    forget(cache, 4)  # two of A's go, to the host if there is one
    assert cache.drop_adapter("A") == 2
    assert (cache.pool.num_free, cache.host_pool.num_free) == (6, num_host_pages)
    assert found(cache, A_SPACE, "a") == 0 and found(cache, BASE_SPACE, "ab") == 2
    assert cache.drop_adapter("A") == 0
    assert cache.drop_adapter("never seen") == 0
    cache.check([])


pages = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.lists(pages, min_size=1, max_size=4), min_size=2, max_size=2))
def test_no_other_pages_lead_to_the_same_name(
    chains: list[list[tuple[int, ...]]],
) -> None:
    """Case 46 (tokenspeed)."""
    names = []
    for chain in chains:
        name = A_SPACE.key
        for page in chain:
            name = page_hash(name, page)
        names.append(name)
    assert (names[0] == names[1]) == (chains[0] == chains[1])


def test_no_cut_count_or_width_of_tokens_makes_two_pages_alike() -> None:
    """Case 46 (tokenspeed), the spellings that have been mistaken for each other."""
    chains: list[list[tuple[int, ...]]] = [
        [(1, 2), (3, 4)],
        [(1, 2, 3, 4)],
        [(1,), (2, 3, 4)],
        [(1, 2, 3), (4,)],
        [(12, 34)],
        [(1, 234)],
        [(1 + (2 << 8),), (3, 4)],
        [(1, 2), (3, 4), ()],
        [(2, 1, 2), (3, 4)],
    ]
    names = set()
    for key in (A_SPACE.key, BASE_SPACE.key):
        for chain in chains:
            name = key
            for page in chain:
                name = page_hash(name, page)
            names.add(name)
    assert len(names) == 2 * len(chains)
