"""Names, versions, pins and the host tier, without a disk."""

import pytest

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.loaded_adapters import LoadedAdapter
from cluster.adapters.pins import Limits
from cluster.adapters.records import Facts, Outline, Source
from cluster.errors import Conflict, InvalidRequest, NotFound

SIZE = 1008  # bytes of one adapter below


def outline(content: int, path: str = "", touched: int = 0) -> Outline:
    """Return what is known of an adapter before its tensors are read."""
    source = Source(path or f"/adapters/{content}")
    return Outline(source, f"{content} {touched}", f"{content}", 4, SIZE, ("q_proj",))


def loaded(content: int, path: str = "", touched: int = 0) -> LoadedAdapter:
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
    return LoadedAdapter(facts, (f"shard of {content}",))


def catalog_of(fits: int, max_pinned: int = 9, device_bytes: int | None = None) -> AdapterCatalog:
    """Return a catalog whose host tier holds `fits` adapters."""
    limits = Limits(host_bytes=fits * SIZE, num_slots=max_pinned + 1, device_bytes=device_bytes)
    return AdapterCatalog("smollm2", limits)


def publish(catalog: AdapterCatalog, name: str, content: int, *, pinned: bool = False) -> str:
    """Load in place and return the digest."""
    record = catalog.publish(name, loaded(content), load_inplace=True, pinned=pinned)
    catalog.check()
    assert record.digest is not None
    return record.digest


def pinned(catalog: AdapterCatalog) -> tuple[str, ...]:
    """Return the digests that are pinned."""
    return tuple(facts.digest for facts in catalog.pinned())


def paths(catalog: AdapterCatalog, digest: str) -> list[str]:
    """Return where content that is not in memory would be read."""
    return [source.path for source in catalog.missing(digest)]


def forget_all(catalog: AdapterCatalog) -> None:
    """Let all go that no version points at, as if no request ran."""
    for digest in catalog.retired():
        catalog.forget(digest)
    catalog.check()


def tiers(catalog: AdapterCatalog) -> dict[str, str]:
    """Return the tier of every name."""
    return {record.name: record.tier for record in catalog.records()}


def test_a_published_adapter_is_listed_with_what_is_known_of_it() -> None:
    catalog = catalog_of(1)
    record = catalog.publish("law", loaded(1), load_inplace=False, pinned=True)
    assert catalog.record("law") == record
    assert catalog.records() == (record,)
    assert (record.name, record.version, record.path) == ("law", 1, "/adapters/1")
    assert (record.lora_rank, record.num_bytes, record.modules) == (4, SIZE, ("q_proj",))
    assert (record.pinned, record.tier) == (True, "host")


def test_records_are_ordered_by_name_not_by_arrival() -> None:
    catalog = catalog_of(9)
    for name in ("b", "c", "a"):
        publish(catalog, name, 1)
    assert [record.name for record in catalog.records()] == ["a", "b", "c"]


def test_a_taken_name_is_refused_unless_loaded_in_place() -> None:
    catalog = catalog_of(9)
    publish(catalog, "law", 1)
    with pytest.raises(InvalidRequest, match=r"'law' has already been loaded.*load_inplace"):
        catalog.check_name("law", load_inplace=False)
    with pytest.raises(InvalidRequest, match="already been loaded"):
        catalog.publish("law", loaded(2), load_inplace=False, pinned=False)
    assert catalog.record("law").path == "/adapters/1"


@pytest.mark.parametrize("load_inplace", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "base"])
def test_the_name_of_the_base_model_is_refused(name: str, load_inplace: bool) -> None:
    with pytest.raises(InvalidRequest, match="is the name of the base model"):
        catalog_of(9).check_name(name, load_inplace=load_inplace)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a\n", "\x00", "a\x1b[2J", "../up", ".dot", "/abs", "a/", "-", "ä", "x" * 129],
)
def test_names_that_cannot_be_told_apart_or_printed_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name an adapter") as caught:
        catalog_of(9).check_name(name, load_inplace=False)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("name", ["a", "my-org/law_v2.1", "base:law@3", "x" * 128, "0", "a+b"])
def test_names_as_hubs_and_tools_make_them_are_taken(name: str) -> None:
    catalog_of(9).check_name(name, load_inplace=False)


def test_new_bytes_make_a_new_version_and_the_same_bytes_do_not() -> None:
    catalog = catalog_of(9)
    versions = []
    for content in (1, 1, 2, 2, 1):
        publish(catalog, "law", content)
        versions.append(catalog.record("law").version)
    assert versions == [1, 1, 2, 2, 3]


def test_the_same_bytes_loaded_in_place_may_move_and_change_their_pin() -> None:
    catalog = catalog_of(9)
    publish(catalog, "law", 1, pinned=True)
    moved = catalog.publish("law", loaded(1, "/moved"), load_inplace=True, pinned=False)
    catalog.check()
    assert (moved.path, moved.version, moved.pinned) == ("/moved", 1, False)


def test_an_unknown_name_is_not_found() -> None:
    catalog = catalog_of(9)
    for call in (
        catalog.record,
        lambda name: catalog.resolve(name, ""),
        lambda n: catalog.unread(n, ""),
    ):
        with pytest.raises(NotFound, match="'law' does not exist"):
            call("law")
    with pytest.raises(NotFound, match="'law' cannot be found"):
        catalog.unload("law")
    with pytest.raises(NotFound, match="has been unloaded"):
        catalog.missing("0" * 64)


def test_versions_go_on_counting_after_an_unload() -> None:
    catalog = catalog_of(9)
    publish(catalog, "law", 1)
    publish(catalog, "law", 2)
    catalog.unload("law")
    publish(catalog, "law", 1)
    assert catalog.record("law").version == 3


def test_content_with_another_name_is_not_retired() -> None:
    catalog = catalog_of(9)
    digest = publish(catalog, "law", 1)
    publish(catalog, "right", 1)
    catalog.unload("law")
    assert catalog.retired() == {}
    catalog.unload("right")
    assert list(catalog.retired()) == [digest]


def test_content_outlives_its_last_name_until_it_is_forgotten() -> None:
    catalog = catalog_of(9)
    digest = publish(catalog, "law", 1)
    catalog.unload("law")
    assert catalog.take(digest) == loaded(1).shards  # requests that resolved it before still get it
    assert catalog.forget(digest) == SIZE
    assert catalog.forget(digest) == 0
    with pytest.raises(NotFound):
        catalog.missing(digest)
    catalog.check()


def test_a_name_loaded_again_while_it_was_drained_ends_the_retirement() -> None:
    catalog = catalog_of(9)
    digest = publish(catalog, "law", 1)
    catalog.unload("law")
    first = catalog.retirement(digest)
    publish(catalog, "law", 1)
    assert catalog.retirement(digest) is None
    catalog.unload("law")
    assert catalog.retirement(digest) not in (None, first)


def test_the_last_four_versions_are_kept_and_what_only_older_ones_held_is_retired() -> None:
    catalog = catalog_of(9)
    digests = [publish(catalog, "law", content) for content in range(6)]
    assert [version.version for version in catalog.record("law").versions] == [3, 4, 5, 6]
    assert list(catalog.retired()) == digests[:2]
    catalog.forget(digests[0])
    assert catalog.take(digests[2]) == loaded(2).shards


def test_content_that_comes_back_knows_since_which_version() -> None:
    catalog = catalog_of(9)
    for content in (1, 2, 1):
        publish(catalog, "law", content)
    versions = catalog.record("law").versions
    assert [(v.version, v.since, v.share) for v in versions] == [(1, 1, 0), (2, 2, 0), (3, 1, 100)]


def test_a_rollback_goes_to_the_version_before_and_on_from_there() -> None:
    catalog = catalog_of(9)
    digests = [publish(catalog, "law", content) for content in range(3)]
    for wanted, got in ((None, 2), (None, 1), (3, 3), (1, 1)):
        target = catalog.rollback_target("law", wanted).number
        assert target == got
        record = catalog.rollback("law", target, {})
        catalog.check()
        assert (record.version, record.digest) == (got, digests[got - 1])
        assert catalog.resolve("law", "x").digest == digests[got - 1]
    with pytest.raises(Conflict, match="no version before 1; kept are 1, 2, 3"):
        catalog.rollback_target("law", None)
    with pytest.raises(Conflict, match="no version 7; kept are 1, 2, 3"):
        catalog.rollback_target("law", 7)
    publish(catalog, "law", 9)
    assert catalog.record("law").version == 4


def test_a_split_gives_each_version_its_share_of_request_ids() -> None:
    catalog = catalog_of(9)
    for content in range(3):
        publish(catalog, "law", content)
    catalog.split("law", {1: 20, 2: 0, 3: 80}, {})
    catalog.check()
    picked = [catalog.resolve("law", f"request-{number}").version for number in range(4000)]
    assert picked == [catalog.resolve("law", f"request-{number}").version for number in range(4000)]
    assert picked.count(2) == 0
    assert 700 < picked.count(1) < 900
    assert [v.share for v in catalog.record("law").versions] == [20, 0, 80]
    publish(catalog, "law", 5)
    assert {catalog.resolve("law", str(number)).version for number in range(100)} == {4}


def test_raising_a_share_only_moves_requests_to_it() -> None:
    catalog = catalog_of(9)
    for content in range(2):
        publish(catalog, "law", content)

    def picked(share: int) -> set[int]:
        catalog.split("law", {1: share, 2: 100 - share}, {})
        return {n for n in range(500) if catalog.resolve("law", str(n)).version == 1}

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
    catalog = catalog_of(9)
    publish(catalog, "law", 1)
    publish(catalog, "law", 2)
    before = catalog.record("law")
    with pytest.raises(error, match=reason):
        catalog.split("law", shares, {})
    assert catalog.record("law") == before


def test_the_least_recently_used_leaves_memory_and_says_where_to_read_it() -> None:
    catalog = catalog_of(2)
    first, second = publish(catalog, "a", 1), publish(catalog, "b", 2)
    catalog.take(first)
    publish(catalog, "c", 3)
    assert tiers(catalog) == {"a": "host", "b": "disk", "c": "host"}
    assert paths(catalog, second) == ["/adapters/2"]
    catalog.restore(loaded(2))
    assert tiers(catalog) == {"a": "disk", "b": "host", "c": "host"}
    assert catalog.take(second) == loaded(2).shards


def test_looking_does_not_count_as_use() -> None:
    catalog = catalog_of(2)
    first = publish(catalog, "a", 1)
    publish(catalog, "b", 2)
    catalog.resolve("a", ""), catalog.records(), catalog.missing(first)
    publish(catalog, "c", 3)
    assert tiers(catalog)["a"] == "disk"


def test_one_adapter_over_the_whole_budget_is_still_served() -> None:
    catalog = catalog_of(0)
    digest = publish(catalog, "a", 1)
    assert catalog.take(digest) == loaded(1).shards
    publish(catalog, "b", 2)
    assert tiers(catalog) == {"a": "disk", "b": "host"}


def test_content_whose_directory_holds_something_else_is_gone_when_it_leaves_memory() -> None:
    catalog = catalog_of(1)
    old = catalog.publish("law", loaded(1, "/law"), load_inplace=True).digest
    catalog.publish("law", loaded(2, "/law"), load_inplace=True)
    catalog.check()
    assert old is not None
    assert [v.tier for v in catalog.record("law").versions] == ["gone", "host"]
    assert paths(catalog, old) == ["/law"]  # worth a look: the old files may be back
    catalog.restore(loaded(1, "/law"))
    assert [v.tier for v in catalog.record("law").versions] == ["host", "gone"]


def test_pinned_adapters_stay_however_long_unused() -> None:
    catalog = catalog_of(2)
    digest = publish(catalog, "a", 1, pinned=True)
    for content in range(2, 6):
        publish(catalog, f"x{content}", content)
    assert [name for name, tier in tiers(catalog).items() if tier == "host"] == ["a", "x5"]
    assert pinned(catalog) == (digest,)


def test_pinning_more_bytes_than_fit_is_refused_with_the_numbers_and_changes_nothing() -> None:
    catalog = catalog_of(2)
    publish(catalog, "a", 1, pinned=True)
    publish(catalog, "b", 2, pinned=True)
    before = catalog.records()
    with pytest.raises(InvalidRequest, match=f"{2 * SIZE} of {2 * SIZE} bytes") as caught:
        catalog.publish("c", loaded(3), load_inplace=False, pinned=True)
    assert caught.value.param == "pinned"
    assert catalog.records() == before
    assert catalog.retired() == {}
    publish(catalog, "b", 3, pinned=True)  # replaces its own pin
    publish(catalog, "c", 3, pinned=True)  # the same bytes count once
    forget_all(catalog)


def test_pinning_more_adapters_than_slots_allow_is_refused_with_the_numbers() -> None:
    catalog = catalog_of(9, max_pinned=2)
    publish(catalog, "a", 1, pinned=True)
    publish(catalog, "b", 2, pinned=True)
    with pytest.raises(InvalidRequest, match="2 adapters are pinned already, and 2 may be"):
        catalog.publish("c", loaded(3), load_inplace=False, pinned=True)
    catalog.check()
    publish(catalog, "c", 2, pinned=True)


def test_pinning_leaves_room_on_the_device_for_the_largest_of_all() -> None:
    catalog = catalog_of(9, device_bytes=1000)
    publish(catalog, "a", 3, pinned=True)
    publish(catalog, "big", 5)
    with pytest.raises(InvalidRequest, match="takes 400 bytes .* 300 of 1000 .* 500 must stay"):
        catalog.publish("b", loaded(4), load_inplace=False, pinned=True)
    catalog.check()
    publish(catalog, "b", 2, pinned=True)
    assert catalog.resolve("b", "").num_bytes == 200
    alone = catalog_of(9, device_bytes=1000)
    publish(alone, "a", 9, pinned=True)  # there is no other


def test_what_has_no_weighted_sum_says_so() -> None:
    catalog = catalog_of(9)
    publish(catalog, "plain", 1)
    publish(catalog, "dora", 9)
    assert [catalog.resolve(name, "").stands_alone for name in ("plain", "dora")] == [False, True]


def test_a_pin_follows_the_versions_that_get_requests() -> None:
    catalog = catalog_of(2)
    old = publish(catalog, "law", 1, pinned=True)
    new = publish(catalog, "law", 2, pinned=True)
    assert pinned(catalog) == (new,)
    catalog.split("law", {1: 50, 2: 50}, {})
    assert pinned(catalog) == tuple(sorted((old, new)))
    publish(catalog, "x", 3)
    catalog.check()
    catalog.rollback("law", 1, {})
    catalog.check()
    assert pinned(catalog) == (old,)
    publish(catalog, "law", 1, pinned=False)
    assert pinned(catalog) == ()


def test_a_pinned_name_is_not_split_beyond_what_fits() -> None:
    catalog = catalog_of(1)
    publish(catalog, "law", 1, pinned=True)
    new = publish(catalog, "law", 2, pinned=True)
    with pytest.raises(InvalidRequest, match="cannot be pinned"):
        catalog.split("law", {1: 50, 2: 50}, {loaded(1).facts.digest: loaded(1)})
    catalog.check()
    assert pinned(catalog) == (new,)


def test_unloading_one_of_two_pinned_names_keeps_the_content_pinned() -> None:
    catalog = catalog_of(1)
    publish(catalog, "a", 1, pinned=True)
    publish(catalog, "b", 1, pinned=True)
    catalog.unload("a")
    publish(catalog, "x", 2)
    assert tiers(catalog) == {"b": "host", "x": "host"}
    catalog.unload("b")
    catalog.check()


def test_content_is_read_again_from_a_directory_that_still_has_a_name() -> None:
    catalog = catalog_of(1)
    digest = catalog.publish("a", loaded(1, "/one"), load_inplace=False).digest
    catalog.publish("b", loaded(1, "/two"), load_inplace=False)
    publish(catalog, "x", 2)
    assert digest is not None
    assert paths(catalog, digest)[0] == "/two"
    catalog.publish("c", loaded(7, "/two"), load_inplace=False)
    assert paths(catalog, digest)[0] == "/one"
    assert catalog.record("a").path == "/one"


def test_content_that_was_forgotten_while_it_was_read_is_not_wanted_back() -> None:
    catalog = catalog_of(1)
    digest = publish(catalog, "a", 1)
    publish(catalog, "b", 2)
    catalog.unload("a")
    catalog.forget(digest)
    catalog.restore(loaded(1))
    with pytest.raises(NotFound):
        catalog.take(digest)
    assert tiers(catalog) == {"b": "host"}
    catalog.check()


def test_a_registered_name_has_no_digest_before_its_first_request() -> None:
    catalog = catalog_of(9)
    record = catalog.register("law", outline(1))
    catalog.check()
    assert (record.digest, record.version, record.tier) == (None, 1, "disk")
    assert (record.lora_rank, record.num_bytes, record.modules) == (4, SIZE, ("q_proj",))
    unread = catalog.unread("law", "x")
    assert unread is not None and unread.outline.source == Source("/adapters/1")
    catalog.complete(loaded(1))
    catalog.check()
    assert catalog.unread("law", "x") is None
    assert catalog.resolve("law", "x").digest == loaded(1).facts.digest
    assert catalog.record("law").version == 1


def test_one_read_settles_all_names_of_a_directory() -> None:
    catalog = catalog_of(9)
    catalog.register("law", outline(1))
    catalog.register("right", outline(1))
    catalog.complete(loaded(1))
    catalog.check()
    assert catalog.resolve("law", "").digest == catalog.resolve("right", "").digest


def test_a_directory_touched_before_its_first_request_is_another_version() -> None:
    catalog = catalog_of(9)
    catalog.register("law", outline(1, "/law"))
    catalog.complete(loaded(2, "/law"))
    catalog.check()
    assert [v.version for v in catalog.record("law").versions] == [2]
    catalog.complete(loaded(3, "/law"))  # nobody waits for it
    assert catalog.record("law").digest == loaded(2).facts.digest


def test_what_was_never_read_is_dropped_when_its_directory_holds_something_else() -> None:
    catalog = catalog_of(9)
    catalog.register("law", outline(1, "/law"))
    catalog.publish("law", loaded(2, "/law"), load_inplace=True)
    catalog.check()
    assert [v.version for v in catalog.record("law").versions] == [2]


def test_what_was_never_read_can_be_rolled_back_to_while_its_directory_is_there() -> None:
    catalog = catalog_of(9)
    catalog.register("law", outline(1))
    publish(catalog, "law", 2)
    assert catalog.rollback_target("law", None).digest is None
    catalog.complete(loaded(1))
    catalog.check()
    catalog.rollback("law", 1, {})
    assert catalog.resolve("law", "").digest == loaded(1).facts.digest


def test_a_name_unloaded_while_its_directory_was_read_stays_out() -> None:
    catalog = catalog_of(9)
    catalog.register("law", outline(1))
    catalog.unload("law")
    catalog.complete(loaded(1))
    catalog.check()
    assert catalog.records() == ()
    assert catalog.retired() == {}
