"""Names, versions, pins and the host tier, without a disk."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.adapters.adapter import Adapter, LoraModule, adapter_digest
from cluster.adapters.pool import AdapterPool
from cluster.errors import InvalidRequest, NotFound
from tests.cluster.adapters.tiny import MODEL

SIZE = 4 * (4 * 27 + 36 * 4)  # bytes of one adapter below


def adapter(content: int, path: str = "") -> Adapter:
    """Return one of many adapters of SIZE bytes; equal contents have equal digests."""
    a, b = np.full((4, 27), content, np.uint32), np.zeros((36, 4), np.uint32)
    modules = (LoraModule(layer=0, module="q_proj", scaling=1.0, a=a, b=b),)
    digest = adapter_digest("float32", modules)
    return Adapter(digest, path or f"/adapters/{content}", MODEL, "float32", modules)


def pool_of(fits: int) -> AdapterPool:
    """Return a pool whose host tier holds `fits` adapters."""
    return AdapterPool(base_name="smollm2", host_bytes=fits * SIZE)


def publish(pool: AdapterPool, name: str, content: int, *, pinned: bool = False) -> str:
    """Load in place and return the digest."""
    record = pool.publish(name, adapter(content), load_inplace=True, pinned=pinned)
    pool.check()
    return record.digest


def tiers(pool: AdapterPool) -> dict[str, str]:
    """Return the tier of every name."""
    return {record.name: record.tier for record in pool.records()}


def test_a_published_adapter_is_listed_with_what_is_known_of_it() -> None:
    pool = pool_of(1)
    record = pool.publish("law", adapter(1), load_inplace=False, pinned=True)
    assert pool.resolve("law") == record
    assert pool.records() == (record,)
    assert (record.name, record.version, record.path) == ("law", 1, "/adapters/1")
    assert (record.lora_rank, record.num_bytes, record.modules) == (4, SIZE, ("q_proj",))
    assert (record.pinned, record.tier) == (True, "host")


def test_records_are_ordered_by_name_not_by_arrival() -> None:
    pool = pool_of(9)
    for name in ("b", "c", "a"):
        publish(pool, name, 1)
    assert [record.name for record in pool.records()] == ["a", "b", "c"]


def test_a_taken_name_is_refused_unless_loaded_in_place() -> None:
    pool = pool_of(9)
    publish(pool, "law", 1)
    with pytest.raises(InvalidRequest, match=r"'law' has already been loaded.*load_inplace"):
        pool.check_name("law", load_inplace=False)
    with pytest.raises(InvalidRequest, match="already been loaded"):
        pool.publish("law", adapter(2), load_inplace=False, pinned=False)
    assert pool.resolve("law").path == "/adapters/1"


@pytest.mark.parametrize("load_inplace", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "base"])
def test_the_name_of_the_base_model_is_refused(name: str, load_inplace: bool) -> None:
    with pytest.raises(InvalidRequest, match="is the name of the base model"):
        pool_of(9).check_name(name, load_inplace=load_inplace)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a\n", "\x00", "a\x1b[2J", "../up", ".dot", "/abs", "a/", "-", "ä", "x" * 129],
)
def test_names_that_cannot_be_told_apart_or_printed_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name an adapter") as caught:
        pool_of(9).check_name(name, load_inplace=False)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("name", ["a", "my-org/law_v2.1", "base:law@3", "x" * 128, "0", "a+b"])
def test_names_as_hubs_and_tools_make_them_are_taken(name: str) -> None:
    pool_of(9).check_name(name, load_inplace=False)


def test_new_bytes_make_a_new_version_and_the_same_bytes_do_not() -> None:
    pool = pool_of(9)
    versions = []
    for content in (1, 1, 2, 2, 1):
        publish(pool, "law", content)
        versions.append(pool.resolve("law").version)
    assert versions == [1, 1, 2, 2, 3]


def test_the_same_bytes_loaded_in_place_may_move_and_change_their_pin() -> None:
    pool = pool_of(9)
    publish(pool, "law", 1, pinned=True)
    moved = pool.publish("law", adapter(1, "/moved"), load_inplace=True, pinned=False)
    pool.check()
    assert (moved.path, moved.version, moved.pinned) == ("/moved", 1, False)


def test_an_unknown_name_is_not_found() -> None:
    pool = pool_of(9)
    with pytest.raises(NotFound, match="'law' does not exist"):
        pool.resolve("law")
    with pytest.raises(NotFound, match="'law' cannot be found"):
        pool.unload("law")
    with pytest.raises(NotFound, match="has been unloaded"):
        pool.missing("0" * 64)


def test_unloading_one_of_two_names_of_a_content_says_that_it_was_not_the_last() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    publish(pool, "right", 1)
    assert pool.unload("law").last_name is False
    pool.forget(digest)  # a name still points at it
    assert pool.missing(digest) is None
    result = pool.unload("right")
    assert (result.digest, result.last_name) == (digest, True)


def test_content_outlives_its_last_name_until_it_is_forgotten() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    pool.unload("law")
    assert pool.missing(digest) is None  # requests that resolved it before still get it
    assert len(pool.shards(digest, 2)) == 2
    pool.forget(digest)
    pool.forget(digest)
    with pytest.raises(NotFound):
        pool.missing(digest)
    pool.check()


def test_a_name_loaded_again_while_it_was_drained_is_not_forgotten() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    pool.unload("law")
    publish(pool, "law", 1)
    pool.forget(digest)
    assert pool.missing(digest) is None
    assert pool.resolve("law").version == 1


def test_the_replaced_content_can_still_be_taken_by_running_requests() -> None:
    pool = pool_of(9)
    old = publish(pool, "law", 1)
    new = publish(pool, "law", 2)
    assert old != new
    assert pool.take(old).digest == old


def test_the_least_recently_used_leaves_memory_and_says_where_to_read_it() -> None:
    pool = pool_of(2)
    first, second = publish(pool, "a", 1), publish(pool, "b", 2)
    pool.shards(first, 1)
    publish(pool, "c", 3)
    assert tiers(pool) == {"a": "host", "b": "disk", "c": "host"}
    assert pool.missing(second) == "/adapters/2"
    pool.restore(adapter(2))
    assert tiers(pool) == {"a": "disk", "b": "host", "c": "host"}
    assert pool.take(second).digest == second


def test_looking_does_not_count_as_use() -> None:
    pool = pool_of(2)
    first = publish(pool, "a", 1)
    publish(pool, "b", 2)
    pool.resolve("a"), pool.records(), pool.missing(first)
    publish(pool, "c", 3)
    assert tiers(pool)["a"] == "disk"


def test_one_adapter_over_the_whole_budget_is_still_served() -> None:
    pool = pool_of(0)
    digest = publish(pool, "a", 1)
    assert pool.take(digest).digest == digest
    publish(pool, "b", 2)
    assert tiers(pool) == {"a": "disk", "b": "host"}


def test_pinned_adapters_stay_however_long_unused() -> None:
    pool = pool_of(2)
    publish(pool, "a", 1, pinned=True)
    for content in range(2, 6):
        publish(pool, f"x{content}", content)
    assert [name for name, tier in tiers(pool).items() if tier == "host"] == ["a", "x5"]


def test_pinning_more_than_fits_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = pool_of(2)
    publish(pool, "a", 1, pinned=True)
    publish(pool, "b", 2, pinned=True)
    before = pool.records()
    with pytest.raises(InvalidRequest, match=f"{2 * SIZE} of {2 * SIZE} bytes") as caught:
        pool.publish("c", adapter(3), load_inplace=False, pinned=True)
    assert caught.value.param == "pinned"
    assert pool.records() == before
    publish(pool, "b", 3, pinned=True)  # replaces its own pin
    publish(pool, "c", 3, pinned=True)  # the same bytes count once


def test_unloading_one_of_two_pinned_names_keeps_the_content_pinned() -> None:
    pool = pool_of(1)
    publish(pool, "a", 1, pinned=True)
    publish(pool, "b", 1, pinned=True)
    pool.unload("a")
    publish(pool, "x", 2)
    assert tiers(pool) == {"b": "host", "x": "host"}
    pool.unload("b")
    pool.check()


def test_content_is_read_again_from_a_directory_that_still_has_a_name() -> None:
    pool = pool_of(1)
    digest = pool.publish("a", adapter(1, "/one"), load_inplace=False, pinned=False).digest
    pool.publish("b", adapter(1, "/two"), load_inplace=False, pinned=False)
    publish(pool, "x", 2)
    assert pool.missing(digest) == "/two"
    pool.unload("b")
    assert pool.missing(digest) == "/one"
    assert pool.resolve("a").path == "/one"


def test_content_that_was_forgotten_while_it_was_read_is_not_wanted_back() -> None:
    pool = pool_of(1)
    digest = publish(pool, "a", 1)
    publish(pool, "b", 2)
    pool.unload("a")
    pool.forget(digest)
    pool.restore(adapter(1))
    with pytest.raises(NotFound):
        pool.take(digest)
    assert tiers(pool) == {"b": "host"}
    pool.check()


names = st.sampled_from(["a", "b", "c", "d"])
contents = st.integers(0, 5)


class PoolLife(RuleBasedStateMachine):
    """Random lives of a small pool beside a plain model of the catalogue."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(3)
        self.model: dict[str, int] = {}
        self.digests = {adapter(content).digest: content for content in range(6)}

    @rule(name=names, content=contents, pinned=st.booleans())
    def publish(self, name: str, content: int, pinned: bool) -> None:
        try:
            self.pool.publish(name, adapter(content), load_inplace=True, pinned=pinned)
        except InvalidRequest:
            return
        self.model[name] = content

    @rule(name=names)
    def unload_and_forget(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(NotFound):
                self.pool.unload(name)
            return
        content = self.model.pop(name)
        result = self.pool.unload(name)
        assert result.last_name == (content not in self.model.values())
        self.pool.forget(result.digest)

    @rule(content=contents)
    def use(self, content: int) -> None:
        wanted = adapter(content)
        try:
            path = self.pool.missing(wanted.digest)
        except NotFound:
            assert content not in self.model.values()
            return
        if path is not None:
            self.pool.restore(replace(wanted, path=path))
        assert self.pool.take(wanted.digest).digest == wanted.digest

    @invariant()
    def names_point_at_what_was_published(self) -> None:
        self.pool.check()
        found = {record.name: self.digests[record.digest] for record in self.pool.records()}
        assert found == self.model


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=60, stateful_step_count=40)
