"""Names in calls: the base model's, an adapter's, and BASE:ADAPTER for either."""

import pytest

from cluster.errors import Forbidden, InvalidRequest, NotFound
from cluster.router.model_resolver import ANYONE, ModelResolver, Principal
from cluster.router.testing.fake_backend import FakeBackend

LIMITED = Principal(
    tenant="t", adapters=frozenset({"pirate"}), admin=False, min_priority=0, weight=1
)


async def backend_with(*names: str) -> FakeBackend:
    backend = FakeBackend()
    for name in names:
        await backend.load(name, f"/adapters/{name}", False, False)
    return backend


async def test_an_adapter_may_be_named_behind_the_base_model() -> None:
    models = ModelResolver("org/base", await backend_with("pirate"))
    plain = await models.resolve("pirate", None, ANYONE, "r")
    assert await models.resolve("org/base:pirate", None, ANYONE, "r") == plain
    assert plain.names == ("pirate",)
    await models.require("org/base:pirate", ANYONE)
    assert (await models.record("org/base:pirate", ANYONE)).name == "pirate"


async def test_an_adapter_that_is_really_called_so_goes_first() -> None:
    models = ModelResolver("base", await backend_with("pirate", "base:pirate"))
    plain = await models.resolve("pirate", None, ANYONE, "r")
    literal = await models.resolve("base:pirate", None, ANYONE, "r")
    assert literal.names == ("base:pirate",)
    assert literal.adapter != plain.adapter
    doubled = await models.resolve("base:base:pirate", None, ANYONE, "r")
    assert doubled == literal


@pytest.mark.parametrize(
    "name",
    ["base:", "base:base", "base:none", "base:base:pirate", "pirate:base", "bas:pirate", ":pirate"],
)
async def test_what_names_nothing_is_not_found(name: str) -> None:
    backend = await backend_with("pirate")
    models = ModelResolver("base", backend)
    with pytest.raises(NotFound):
        await models.resolve(name, None, ANYONE, "r")
    with pytest.raises(NotFound):
        await models.require(name, ANYONE)


async def test_the_rights_of_a_key_are_for_the_adapter_that_is_meant() -> None:
    models = ModelResolver("base", await backend_with("pirate", "poet"))
    assert (await models.resolve("base:pirate", None, LIMITED, "r")).names == ("pirate",)
    for name in ("base:poet", "base:none", "poet"):
        with pytest.raises(Forbidden):
            await models.resolve(name, None, LIMITED, "r")
        with pytest.raises(Forbidden):
            await models.require(name, LIMITED)


async def test_a_key_gets_no_other_adapter_for_a_name_that_it_may_not_use() -> None:
    models = ModelResolver("base", await backend_with("pirate", "base:pirate"))
    with pytest.raises(Forbidden):
        await models.resolve("base:pirate", None, LIMITED, "r")


async def test_the_adapters_of_a_sum_may_be_named_so_too() -> None:
    models = ModelResolver("base", await backend_with("pirate", "poet"))
    plain = await models.resolve("base", [("pirate", 0.5), ("poet", 1.0)], ANYONE, "r")
    named = [("base:pirate", 0.5), ("base:poet", 1.0)]
    assert await models.resolve("base", named, ANYONE, "r") == plain
    assert plain.names == ("pirate", "poet")
    with pytest.raises(InvalidRequest, match="is the base model"):
        await models.resolve("base", [("base:base", 1.0)], ANYONE, "r")
    with pytest.raises(Forbidden):
        await models.resolve("base", [("base:poet", 1.0)], LIMITED, "r")
