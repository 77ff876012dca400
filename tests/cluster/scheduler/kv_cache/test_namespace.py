"""The keys that keep K/V apart."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.kv_cache.radix_tree import namespace


def test_no_salt_can_spell_an_adapter() -> None:
    digest = "ab" * 32
    assert namespace("m", digest, "").key != namespace("m", BASE, digest).key
    assert namespace("m", "a", "bc").key != namespace("m", "ab", "c").key
    framed_by_hand = "\x00" * 8 + digest
    assert namespace("m", BASE, framed_by_hand).key != namespace("m", digest, "").key


def test_another_base_model_is_another_namespace() -> None:
    assert namespace("m1", BASE, "").key != namespace("m2", BASE, "").key


def test_a_salt_that_is_not_valid_unicode_still_has_a_namespace_of_its_own() -> None:
    assert namespace("m", BASE, "\ud800").key != namespace("m", BASE, "\ud801").key


@given(st.tuples(*[st.text(max_size=6)] * 3), st.tuples(*[st.text(max_size=6)] * 3))
def test_keys_are_equal_only_for_equal_parts(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (namespace(*one).key == namespace(*other).key) == (one == other)
