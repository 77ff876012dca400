"""What tenants and keys may hold: names, bytes and pins, whoever loads and whoever unloads."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.adapters.versions import KEPT_VERSIONS
from cluster.errors import Forbidden, InvalidRequest
from cluster.tenancy.owners import Caller, HoldingLimits, Owner
from tests.cluster.adapters.test_catalog import SIZE, catalog_of, loaded, outline
from tests.random_cases import num_cases


def caller(tenant: str = "acme", key: str = "k", **limits: Any) -> Caller:
    return Caller(Owner(tenant, key), HoldingLimits(**limits))


def load(catalog: Any, name: str, content: int, who: Caller | None, *, pinned: bool = False) -> Any:
    catalog.check_room(name, who, pinned=pinned)
    record = catalog.publish(name, loaded(content), load_inplace=True, pinned=pinned, caller=who)
    catalog.check()
    return record


def test_a_tenant_may_load_so_many_adapters_and_an_unload_gives_one_back() -> None:
    catalog, acme = catalog_of(9), caller(max_adapters=2)
    for name in ("a", "b"):
        assert load(catalog, name, 1, acme).owner == Owner("acme", "k")
    with pytest.raises(Forbidden) as caught:
        load(catalog, "c", 1, acme)
    assert caught.value.code == "adapter_limit_exceeded"
    assert caught.value.message == (
        "'c' would let the tenant 'acme' hold 3 adapters that calls have loaded: the limit is 2, "
        "and 2 are held"
    )
    assert "c" not in catalog
    load(catalog, "a", 2, acme)  # in place: no more than before
    load(catalog, "c", 1, caller("other", max_adapters=1))
    catalog.unload("b")  # whoever does it
    load(catalog, "d", 3, acme)


def test_what_the_configuration_and_others_bring_counts_for_nobody_else() -> None:
    catalog, acme = catalog_of(9), caller(max_adapters=1, max_adapter_bytes=SIZE)
    catalog.register("configured", outline(7))
    catalog.publish("watched", loaded(8), load_inplace=False, watched=True)
    load(catalog, "other", 9, caller("other"))
    load(catalog, "a", 1, acme)
    with pytest.raises(Forbidden, match="1 are held"):
        load(catalog, "b", 1, acme)
    catalog.unload("a")
    load(catalog, "watched", 8, acme)  # taken over
    with pytest.raises(Forbidden, match="1 are held"):
        load(catalog, "b", 1, acme)
    catalog.publish("watched", loaded(8), load_inplace=True, watched=True)  # and given back
    load(catalog, "b", 1, acme)


def test_an_administrator_of_another_tenant_who_replaces_an_adapter_has_it() -> None:
    catalog, acme = catalog_of(9), caller(max_adapters=1)
    load(catalog, "a", 1, acme)
    load(catalog, "a", 2, caller("ops"))
    load(catalog, "b", 1, acme)
    with pytest.raises(Forbidden):
        load(catalog, "a", 1, acme)


def test_bytes_are_of_all_versions_and_of_equal_content_once() -> None:
    catalog, acme = catalog_of(9), caller(max_adapter_bytes=2 * SIZE)
    load(catalog, "a", 1, acme)
    load(catalog, "b", 1, acme)
    load(catalog, "a", 2, acme)  # the version before is kept
    with pytest.raises(
        Forbidden, match=f"hold {3 * SIZE} bytes .* limit is {2 * SIZE}, and {2 * SIZE}"
    ):
        load(catalog, "b", 3, acme)
    assert catalog.record("b").digest == "digest 1"
    catalog.rollback("a", 1, {})
    with pytest.raises(Forbidden):
        load(catalog, "b", 3, acme)
    catalog.unload("a")
    load(catalog, "b", 3, acme)


def test_pins_count_for_who_has_pinned() -> None:
    catalog, acme = catalog_of(9), caller(max_pinned=1)
    load(catalog, "a", 1, acme, pinned=True)
    load(catalog, "b", 2, acme)
    for pin in (
        lambda: catalog.pin("b", {}, acme),
        lambda: load(catalog, "b", 3, acme, pinned=True),
    ):
        with pytest.raises(Forbidden, match="2 adapters that calls have pinned: the limit is 1"):
            pin()
        assert not catalog.record("b").pinned and catalog.record("b").version == 1
    catalog.pin("b", {}, caller("ops"))
    catalog.pin("b", {}, acme)  # it is so already
    catalog.check()
    catalog.unpin("a")
    catalog.unpin("b")
    catalog.pin("b", {}, acme)
    with pytest.raises(Forbidden):
        catalog.pin("a", {}, acme)
    catalog.unload("b")
    catalog.pin("a", {}, acme)
    load(catalog, "a", 1, acme)  # without a pin
    catalog.check()


def test_none_may_be_pinned_where_the_limit_is_nothing() -> None:
    catalog, acme = catalog_of(9), caller(max_pinned=0)
    with pytest.raises(Forbidden, match="the limit is 0, and 0 are held"):
        load(catalog, "a", 1, acme, pinned=True)
    load(catalog, "a", 1, acme)


def test_a_keys_limit_and_its_tenants_hold_both() -> None:
    def key(name: str) -> Caller:
        tenant_limits, key_limits = HoldingLimits(max_adapters=3), HoldingLimits(max_adapters=2)
        return Caller(Owner("acme", name), tenant_limits, key_limits)

    catalog = catalog_of(9)
    for name in ("a", "b"):
        load(catalog, name, 1, key("one"))
    with pytest.raises(Forbidden, match="let this key hold 3"):
        load(catalog, "c", 1, key("one"))
    load(catalog, "c", 1, key("two"))
    with pytest.raises(Forbidden, match="let the tenant 'acme' hold 4"):
        load(catalog, "d", 1, key("two"))
    load(catalog, "a", 1, key("two"))
    with pytest.raises(Forbidden, match="let the tenant 'acme' hold 4"):
        load(catalog, "d", 1, key("one"))


def test_a_limit_that_is_lowered_takes_nothing_away() -> None:
    catalog = catalog_of(9)
    for number, name in enumerate(("a", "b", "c")):
        load(catalog, name, number, caller(max_adapters=3))
    low = caller(max_adapters=1, max_adapter_bytes=1, max_pinned=0)
    load(catalog, "a", 1, low)  # it grows by nothing that is counted
    with pytest.raises(Forbidden):
        load(catalog, "a", 5, low)
    with pytest.raises(Forbidden):
        load(catalog, "d", 1, low)


def test_what_cannot_be_pinned_at_all_counts_for_nobody() -> None:
    catalog, acme = catalog_of(9, max_pinned=1), caller(max_adapters=1, max_pinned=1)
    load(catalog, "x", 5, None, pinned=True)
    with pytest.raises(InvalidRequest):
        load(catalog, "a", 1, acme, pinned=True)
    catalog.check()
    load(catalog, "a", 1, acme)


TENANTS = ("acme", "bolt")
KEYS = ("one", "two")
LIMITS = {
    "acme": HoldingLimits(max_adapters=3, max_adapter_bytes=4 * SIZE, max_pinned=2),
    "bolt": HoldingLimits(max_adapters=2, max_adapter_bytes=3 * SIZE, max_pinned=1),
}
KEY_LIMITS = HoldingLimits(max_adapters=2, max_adapter_bytes=3 * SIZE, max_pinned=1)
names = st.sampled_from("abcdef")
contents = st.integers(1, 6)
whose = st.tuples(st.sampled_from(TENANTS), st.sampled_from(KEYS))


@dataclass(slots=True)
class Expected:
    """A name as a simple book keeps it."""

    owner: tuple[str, str] | None
    contents: list[int] = field(default_factory=list)  # of all versions that are kept
    pinned_by: tuple[str, str] | None = None


def measures(book: dict[str, Expected], tenant: str, key: str | None) -> tuple[int, int, int]:
    """Return how many names, pins and bytes are a tenant's, or one of its keys'."""

    def has(owner: tuple[str, str] | None) -> bool:
        return owner is not None and owner[0] == tenant and key in (None, owner[1])

    own = [one for one in book.values() if has(one.owner)]
    num_pinned = sum(has(one.pinned_by) for one in book.values())
    return len(own), num_pinned, SIZE * len({c for one in own for c in one.contents})


class Tenants(RuleBasedStateMachine):
    """Tenants, an administrator and the configuration load, pin and unload in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = catalog_of(20, max_pinned=9)
        self.book: dict[str, Expected] = {}

    def caller(self, who: tuple[str, str]) -> Caller:
        return Caller(Owner(*who), LIMITS[who[0]], KEY_LIMITS)

    def fits(self, who: tuple[str, str], book: dict[str, Expected]) -> bool:
        """Tell whether a call may make the book this one, counted anew from the beginning."""
        for limits, key in ((LIMITS[who[0]], None), (KEY_LIMITS, who[1])):
            most = (limits.max_adapters, limits.max_pinned, limits.max_adapter_bytes)
            before, after = (measures(one, who[0], key) for one in (self.book, book))
            if any(a > max(b, m or 0) for a, b, m in zip(after, before, most, strict=True)):
                return False
        return True

    def loaded_book(
        self, name: str, content: int, who: tuple[str, str] | None, pinned: bool
    ) -> dict[str, Expected]:
        before = self.book.get(name)
        kept = before.contents if before else []
        if kept[-1:] != [content]:  # equal content is no new version
            kept = [*kept, content][-KEPT_VERSIONS:]
        by = (who or (before.pinned_by if before else None)) if pinned else None
        return self.book | {name: Expected(who, kept, by)}

    @rule(name=names, content=contents, who=whose, pinned=st.booleans())
    def load(self, name: str, content: int, who: tuple[str, str], pinned: bool) -> None:
        book = self.loaded_book(name, content, who, pinned)
        if self.fits(who, book):
            load(self.catalog, name, content, self.caller(who), pinned=pinned)
            self.book = book
        else:
            with pytest.raises(Forbidden):
                load(self.catalog, name, content, self.caller(who), pinned=pinned)

    @rule(name=names, content=contents)
    def replace_as_nobody(self, name: str, content: int) -> None:
        load(self.catalog, name, content, None)
        self.book = self.loaded_book(name, content, None, False)

    @rule(name=names, who=whose)
    def pin(self, name: str, who: tuple[str, str]) -> None:
        if name not in self.book:
            return
        before = self.book[name]
        by = before.pinned_by or who
        book = self.book | {name: Expected(before.owner, before.contents, by)}
        if self.fits(who, book):
            self.catalog.pin(name, {}, self.caller(who))
            self.book = book
        else:
            with pytest.raises(Forbidden):
                self.catalog.pin(name, {}, self.caller(who))

    @rule(name=names)
    def unpin(self, name: str) -> None:
        if name in self.book:
            self.catalog.unpin(name)
            self.book[name].pinned_by = None

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name in self.book:
            self.catalog.unload(name)
            del self.book[name]

    @invariant()
    def books_agree(self) -> None:
        self.catalog.check()
        for record in self.catalog.records():
            owner = None if record.owner is None else (record.owner.tenant, record.owner.key)
            assert owner == self.book[record.name].owner
            assert record.pinned == (self.book[record.name].pinned_by is not None)

    @invariant()
    def nobody_is_over_a_limit(self) -> None:
        for tenant, limits in LIMITS.items():
            num_names, num_pinned, num_bytes = measures(self.book, tenant, None)
            assert num_names <= (limits.max_adapters or 0)
            assert num_pinned <= (limits.max_pinned or 0)
            assert num_bytes <= (limits.max_adapter_bytes or 0)


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=num_cases(40), stateful_step_count=30, deadline=None)
