"""Names, versions, pins and the host tier, without a disk."""

import pytest

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.contents import Loaded
from cluster.adapters.pins import Limits
from cluster.adapters.records import Facts, Outline, Source
from cluster.errors import Conflict, InvalidRequest, NotFound

SIZE = 1008  # bytes of one adapter below


def outline(content: int, path: str = "", touched: int = 0) -> Outline:
    """Return what is known of an adapter before its tensors are read."""
    source = Source(path or f"/adapters/{content}")
    return Outline(source, f"{content} {touched}", f"{content}", 4, SIZE, ("q_proj",))


def loaded(content: int, path: str = "", touched: int = 0) -> Loaded:
    """Return one of many adapters; equal contents have equal digests.

    They take SIZE bytes in host memory and 100 times their content on the device.
    """
    facts = Facts(
        digest=f"digest {content}",
        outline=outline(content, path, touched),
        host_bytes=SIZE,
        device_bytes=100 * content,
        stands_alone=content == 9,
    )
    return Loaded(facts, (f"shard of {content}",))


def pool_of(fits: int, max_pinned: int = 9, device_bytes: int | None = None) -> AdapterCatalog:
    """Return a pool whose host tier holds `fits` adapters."""
    limits = Limits(host_bytes=fits * SIZE, num_slots=max_pinned + 1, device_bytes=device_bytes)
    return AdapterCatalog("smollm2", limits)


def publish(pool: AdapterCatalog, name: str, content: int, *, pinned: bool = False) -> str:
    """Load in place and return the digest."""
    record = pool.publish(name, loaded(content), load_inplace=True, pinned=pinned)
    pool.check()
    assert record.digest is not None
    return record.digest


def pinned(pool: AdapterCatalog) -> tuple[str, ...]:
    """Return the digests that are pinned."""
    return tuple(facts.digest for facts in pool.pinned())


def paths(pool: AdapterCatalog, digest: str) -> list[str]:
    """Return where content that is not in memory would be read."""
    return [source.path for source in pool.missing(digest)]


def forget_all(pool: AdapterCatalog) -> None:
    """Let all go that no version points at, as if no request ran."""
    for digest in pool.retired():
        pool.forget(digest)
    pool.check()


def tiers(pool: AdapterCatalog) -> dict[str, str]:
    """Return the tier of every name."""
    return {record.name: record.tier for record in pool.records()}


def test_a_published_adapter_is_listed_with_what_is_known_of_it() -> None:
    pool = pool_of(1)
    record = pool.publish("law", loaded(1), load_inplace=False, pinned=True)
    assert pool.record("law") == record
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
        pool.publish("law", loaded(2), load_inplace=False, pinned=False)
    assert pool.record("law").path == "/adapters/1"


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
        versions.append(pool.record("law").version)
    assert versions == [1, 1, 2, 2, 3]


def test_the_same_bytes_loaded_in_place_may_move_and_change_their_pin() -> None:
    pool = pool_of(9)
    publish(pool, "law", 1, pinned=True)
    moved = pool.publish("law", loaded(1, "/moved"), load_inplace=True, pinned=False)
    pool.check()
    assert (moved.path, moved.version, moved.pinned) == ("/moved", 1, False)


def test_an_unknown_name_is_not_found() -> None:
    pool = pool_of(9)
    for call in (pool.record, lambda name: pool.resolve(name, ""), lambda n: pool.unread(n, "")):
        with pytest.raises(NotFound, match="'law' does not exist"):
            call("law")
    with pytest.raises(NotFound, match="'law' cannot be found"):
        pool.unload("law")
    with pytest.raises(NotFound, match="has been unloaded"):
        pool.missing("0" * 64)


def test_versions_go_on_counting_after_an_unload() -> None:
    pool = pool_of(9)
    publish(pool, "law", 1)
    publish(pool, "law", 2)
    pool.unload("law")
    publish(pool, "law", 1)
    assert pool.record("law").version == 3


def test_content_with_another_name_is_not_retired() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    publish(pool, "right", 1)
    pool.unload("law")
    assert pool.retired() == {}
    pool.unload("right")
    assert list(pool.retired()) == [digest]


def test_content_outlives_its_last_name_until_it_is_forgotten() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    pool.unload("law")
    assert pool.take(digest) == loaded(1).shards  # requests that resolved it before still get it
    assert pool.forget(digest) == SIZE
    assert pool.forget(digest) == 0
    with pytest.raises(NotFound):
        pool.missing(digest)
    pool.check()


def test_a_name_loaded_again_while_it_was_drained_ends_the_retirement() -> None:
    pool = pool_of(9)
    digest = publish(pool, "law", 1)
    pool.unload("law")
    first = pool.retirement(digest)
    publish(pool, "law", 1)
    assert pool.retirement(digest) is None
    pool.unload("law")
    assert pool.retirement(digest) not in (None, first)


def test_the_last_four_versions_are_kept_and_what_only_older_ones_held_is_retired() -> None:
    pool = pool_of(9)
    digests = [publish(pool, "law", content) for content in range(6)]
    assert [version.version for version in pool.record("law").versions] == [3, 4, 5, 6]
    assert list(pool.retired()) == digests[:2]
    pool.forget(digests[0])
    assert pool.take(digests[2]) == loaded(2).shards


def test_content_that_comes_back_knows_since_which_version() -> None:
    pool = pool_of(9)
    for content in (1, 2, 1):
        publish(pool, "law", content)
    versions = pool.record("law").versions
    assert [(v.version, v.since, v.share) for v in versions] == [(1, 1, 0), (2, 2, 0), (3, 1, 100)]


def test_a_rollback_goes_to_the_version_before_and_on_from_there() -> None:
    pool = pool_of(9)
    digests = [publish(pool, "law", content) for content in range(3)]
    for wanted, got in ((None, 2), (None, 1), (3, 3), (1, 1)):
        target = pool.rollback_target("law", wanted).number
        assert target == got
        record = pool.rollback("law", target, {})
        pool.check()
        assert (record.version, record.digest) == (got, digests[got - 1])
        assert pool.resolve("law", "x").digest == digests[got - 1]
    with pytest.raises(Conflict, match="no version before 1; kept are 1, 2, 3"):
        pool.rollback_target("law", None)
    with pytest.raises(Conflict, match="no version 7; kept are 1, 2, 3"):
        pool.rollback_target("law", 7)
    publish(pool, "law", 9)
    assert pool.record("law").version == 4


def test_a_split_gives_each_version_its_share_of_request_ids() -> None:
    pool = pool_of(9)
    for content in range(3):
        publish(pool, "law", content)
    pool.split("law", {1: 20, 2: 0, 3: 80}, {})
    pool.check()
    picked = [pool.resolve("law", f"request-{number}").version for number in range(4000)]
    assert picked == [pool.resolve("law", f"request-{number}").version for number in range(4000)]
    assert picked.count(2) == 0
    assert 700 < picked.count(1) < 900
    assert [v.share for v in pool.record("law").versions] == [20, 0, 80]
    publish(pool, "law", 5)
    assert {pool.resolve("law", str(number)).version for number in range(100)} == {4}


def test_raising_a_share_only_moves_requests_to_it() -> None:
    pool = pool_of(9)
    for content in range(2):
        publish(pool, "law", content)

    def picked(share: int) -> set[int]:
        pool.split("law", {1: share, 2: 100 - share}, {})
        return {n for n in range(500) if pool.resolve("law", str(n)).version == 1}

    assert set() == picked(0) < picked(10) < picked(50) < picked(100) == set(range(500))


@pytest.mark.parametrize(
    ("shares", "error", "reason"),
    [
        ({1: 50, 2: 49}, InvalidRequest, "sum to 99, not 100"),
        ({}, InvalidRequest, "sum to 0"),
        ({1: 150, 2: -50}, InvalidRequest, "from 0 to 100"),
        ({1: 50, 9: 50}, Conflict, "no version 9"),
    ],
)
def test_shares_that_cannot_be_are_refused_and_change_nothing(
    shares: dict[int, int], error: type[Exception], reason: str
) -> None:
    pool = pool_of(9)
    publish(pool, "law", 1)
    publish(pool, "law", 2)
    before = pool.record("law")
    with pytest.raises(error, match=reason):
        pool.split("law", shares, {})
    assert pool.record("law") == before


def test_the_least_recently_used_leaves_memory_and_says_where_to_read_it() -> None:
    pool = pool_of(2)
    first, second = publish(pool, "a", 1), publish(pool, "b", 2)
    pool.take(first)
    publish(pool, "c", 3)
    assert tiers(pool) == {"a": "host", "b": "disk", "c": "host"}
    assert paths(pool, second) == ["/adapters/2"]
    pool.restore(loaded(2))
    assert tiers(pool) == {"a": "disk", "b": "host", "c": "host"}
    assert pool.take(second) == loaded(2).shards


def test_looking_does_not_count_as_use() -> None:
    pool = pool_of(2)
    first = publish(pool, "a", 1)
    publish(pool, "b", 2)
    pool.resolve("a", ""), pool.records(), pool.missing(first)
    publish(pool, "c", 3)
    assert tiers(pool)["a"] == "disk"


def test_one_adapter_over_the_whole_budget_is_still_served() -> None:
    pool = pool_of(0)
    digest = publish(pool, "a", 1)
    assert pool.take(digest) == loaded(1).shards
    publish(pool, "b", 2)
    assert tiers(pool) == {"a": "disk", "b": "host"}


def test_content_whose_directory_holds_something_else_is_gone_when_it_leaves_memory() -> None:
    pool = pool_of(1)
    old = pool.publish("law", loaded(1, "/law"), load_inplace=True).digest
    pool.publish("law", loaded(2, "/law"), load_inplace=True)
    pool.check()
    assert old is not None
    assert [v.tier for v in pool.record("law").versions] == ["gone", "host"]
    assert paths(pool, old) == ["/law"]  # worth a look: the old files may be back
    pool.restore(loaded(1, "/law"))
    assert [v.tier for v in pool.record("law").versions] == ["host", "gone"]


def test_pinned_adapters_stay_however_long_unused() -> None:
    pool = pool_of(2)
    digest = publish(pool, "a", 1, pinned=True)
    for content in range(2, 6):
        publish(pool, f"x{content}", content)
    assert [name for name, tier in tiers(pool).items() if tier == "host"] == ["a", "x5"]
    assert pinned(pool) == (digest,)


def test_pinning_more_bytes_than_fit_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = pool_of(2)
    publish(pool, "a", 1, pinned=True)
    publish(pool, "b", 2, pinned=True)
    before = pool.records()
    with pytest.raises(InvalidRequest, match=f"{2 * SIZE} of {2 * SIZE} bytes") as caught:
        pool.publish("c", loaded(3), load_inplace=False, pinned=True)
    assert caught.value.param == "pinned"
    assert pool.records() == before
    assert pool.retired() == {}
    publish(pool, "b", 3, pinned=True)  # replaces its own pin
    publish(pool, "c", 3, pinned=True)  # the same bytes count once
    forget_all(pool)


def test_pinning_more_adapters_than_slots_allow_is_refused_with_the_numbers() -> None:
    pool = pool_of(9, max_pinned=2)
    publish(pool, "a", 1, pinned=True)
    publish(pool, "b", 2, pinned=True)
    with pytest.raises(InvalidRequest, match="2 adapters are pinned already, and 2 may be"):
        pool.publish("c", loaded(3), load_inplace=False, pinned=True)
    pool.check()
    publish(pool, "c", 2, pinned=True)


def test_pinning_leaves_room_on_the_device_for_the_largest_of_all() -> None:
    pool = pool_of(9, device_bytes=1000)
    publish(pool, "a", 3, pinned=True)
    publish(pool, "big", 5)
    with pytest.raises(InvalidRequest, match="takes 400 bytes .* 300 of 1000 .* 500 must stay"):
        pool.publish("b", loaded(4), load_inplace=False, pinned=True)
    pool.check()
    publish(pool, "b", 2, pinned=True)
    assert pool.resolve("b", "").num_bytes == 200
    alone = pool_of(9, device_bytes=1000)
    publish(alone, "a", 9, pinned=True)  # there is no other


def test_what_has_no_weighted_sum_says_so() -> None:
    pool = pool_of(9)
    publish(pool, "plain", 1)
    publish(pool, "dora", 9)
    assert [pool.resolve(name, "").stands_alone for name in ("plain", "dora")] == [False, True]


def test_a_pin_follows_the_versions_that_get_requests() -> None:
    pool = pool_of(2)
    old = publish(pool, "law", 1, pinned=True)
    new = publish(pool, "law", 2, pinned=True)
    assert pinned(pool) == (new,)
    pool.split("law", {1: 50, 2: 50}, {})
    assert pinned(pool) == tuple(sorted((old, new)))
    publish(pool, "x", 3)
    pool.check()
    pool.rollback("law", 1, {})
    pool.check()
    assert pinned(pool) == (old,)
    publish(pool, "law", 1, pinned=False)
    assert pinned(pool) == ()


def test_a_pinned_name_is_not_split_beyond_what_fits() -> None:
    pool = pool_of(1)
    publish(pool, "law", 1, pinned=True)
    new = publish(pool, "law", 2, pinned=True)
    with pytest.raises(InvalidRequest, match="cannot be pinned"):
        pool.split("law", {1: 50, 2: 50}, {loaded(1).facts.digest: loaded(1)})
    pool.check()
    assert pinned(pool) == (new,)


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
    digest = pool.publish("a", loaded(1, "/one"), load_inplace=False).digest
    pool.publish("b", loaded(1, "/two"), load_inplace=False)
    publish(pool, "x", 2)
    assert digest is not None
    assert paths(pool, digest)[0] == "/two"
    pool.publish("c", loaded(7, "/two"), load_inplace=False)
    assert paths(pool, digest)[0] == "/one"
    assert pool.record("a").path == "/one"


def test_content_that_was_forgotten_while_it_was_read_is_not_wanted_back() -> None:
    pool = pool_of(1)
    digest = publish(pool, "a", 1)
    publish(pool, "b", 2)
    pool.unload("a")
    pool.forget(digest)
    pool.restore(loaded(1))
    with pytest.raises(NotFound):
        pool.take(digest)
    assert tiers(pool) == {"b": "host"}
    pool.check()


def test_a_registered_name_has_no_digest_before_its_first_request() -> None:
    pool = pool_of(9)
    record = pool.register("law", outline(1))
    pool.check()
    assert (record.digest, record.version, record.tier) == (None, 1, "disk")
    assert (record.lora_rank, record.num_bytes, record.modules) == (4, SIZE, ("q_proj",))
    assert pool.unread("law", "x") == Source("/adapters/1")
    pool.settle(loaded(1))
    pool.check()
    assert pool.unread("law", "x") is None
    assert pool.resolve("law", "x").digest == loaded(1).facts.digest
    assert pool.record("law").version == 1


def test_one_read_settles_all_names_of_a_directory() -> None:
    pool = pool_of(9)
    pool.register("law", outline(1))
    pool.register("right", outline(1))
    pool.settle(loaded(1))
    pool.check()
    assert pool.resolve("law", "").digest == pool.resolve("right", "").digest


def test_a_directory_touched_before_its_first_request_is_another_version() -> None:
    pool = pool_of(9)
    pool.register("law", outline(1, "/law"))
    pool.settle(loaded(2, "/law"))
    pool.check()
    assert [v.version for v in pool.record("law").versions] == [2]
    pool.settle(loaded(3, "/law"))  # nobody waits for it
    assert pool.record("law").digest == loaded(2).facts.digest


def test_what_was_never_read_is_dropped_when_its_directory_holds_something_else() -> None:
    pool = pool_of(9)
    pool.register("law", outline(1, "/law"))
    pool.publish("law", loaded(2, "/law"), load_inplace=True)
    pool.check()
    assert [v.version for v in pool.record("law").versions] == [2]


def test_what_was_never_read_can_be_rolled_back_to_while_its_directory_is_there() -> None:
    pool = pool_of(9)
    pool.register("law", outline(1))
    publish(pool, "law", 2)
    assert pool.rollback_target("law", None).digest is None
    pool.settle(loaded(1))
    pool.check()
    pool.rollback("law", 1, {})
    assert pool.resolve("law", "").digest == loaded(1).facts.digest


def test_a_name_unloaded_while_its_directory_was_read_stays_out() -> None:
    pool = pool_of(9)
    pool.register("law", outline(1))
    pool.unload("law")
    pool.settle(loaded(1))
    pool.check()
    assert pool.records() == ()
    assert pool.retired() == {}
