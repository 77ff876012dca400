"""Names in calls: the base model's, an adapter's, and BASE:ADAPTER for either."""

import pytest

from cluster.errors import InvalidRequest, NotFound
from cluster.router.model_resolver import ModelResolver
from cluster.router.tenancy.principal import ANYONE, NamePatterns, Principal
from cluster.router.testing.fake_backend import FakeBackend

LIMITED = Principal(tenant="t", adapters=NamePatterns.of(["pirate"]))


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


async def refusal(models: ModelResolver, name: str, caller: Principal) -> list[tuple[object, ...]]:
    """Return what is said of a name that is not found, wherever it is asked for."""
    said = []
    for call in (
        models.resolve(name, None, caller, "r"),
        models.resolve("base", [(name, 1.0)], caller, "r"),
        models.require(name, caller),
        models.record(name, caller),
    ):
        with pytest.raises(NotFound) as caught:
            await call
        said.append((caught.value.message, caught.value.param, caught.value.code))
    return said


@pytest.mark.parametrize("name", ["poet", "base:poet", "base:base:poet", "base:pirat"])
async def test_what_a_key_may_not_use_does_not_exist_for_it(name: str) -> None:
    adapters = ("pirate", "poet", "base:poet", "pirat", "base:base:poet")
    said = await refusal(ModelResolver("base", await backend_with(*adapters)), name, LIMITED)
    assert said == await refusal(ModelResolver("base", await backend_with()), name, LIMITED)
    assert said == await refusal(ModelResolver("base", await backend_with()), name, ANYONE)
    text = f"the model '{name}' does not exist"
    assert said[0] == (text, "model", "model_not_found")
    assert said[1] == (text, "lora", "model_not_found")


async def test_nobody_is_asked_for_an_adapter_that_a_key_may_not_use() -> None:
    backend = await backend_with("poet", "base:poet")

    async def unexpected(*_: object) -> None:
        raise AssertionError("somebody was asked")

    backend.record = backend.resolve = unexpected  # type: ignore[method-assign, assignment]
    await refusal(ModelResolver("base", backend), "base:poet", LIMITED)


async def test_the_rights_of_a_key_are_for_the_adapter_that_is_meant() -> None:
    for names in (("pirate",), ("pirate", "base:pirate")):
        models = ModelResolver("base", await backend_with(*names))
        assert (await models.resolve("base:pirate", None, LIMITED, "r")).names == ("pirate",)


async def test_the_adapters_of_a_sum_may_be_named_so_too() -> None:
    models = ModelResolver("base", await backend_with("pirate", "poet"))
    plain = await models.resolve("base", [("pirate", 0.5), ("poet", 1.0)], ANYONE, "r")
    named = [("base:pirate", 0.5), ("base:poet", 1.0)]
    assert await models.resolve("base", named, ANYONE, "r") == plain
    assert plain.names == ("pirate", "poet")
    with pytest.raises(InvalidRequest, match="is the base model"):
        await models.resolve("base", [("base:base", 1.0)], ANYONE, "r")
    with pytest.raises(NotFound):
        await models.resolve("base", [("base:poet", 1.0)], LIMITED, "r")
