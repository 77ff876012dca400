"""Every spelling of tensor names that tools write is read as the one adapter that it is."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.adapters.adapter import Adapter
from tests.cluster.adapters.tiny import (
    TinyAdapter,
    a_of,
    reason,
    table_of,
    tiny_adapter,
    with_dora,
    with_saved,
)

PREFIX = "base_model.model."


def whole() -> TinyAdapter:
    """Return an adapter that has every kind of tensor."""
    tiny = tiny_adapter("q_proj", "up_proj", "lm_head")
    return with_dora(with_saved(tiny, "embed_tokens"))


def _named_default(name: str) -> str:
    if name.endswith("lora_magnitude_vector"):
        return f"{name}.default.weight"
    if name.endswith("embed_tokens.weight"):
        return name.replace(".weight", ".modules_to_save.default.weight")
    return name.replace(".weight", ".default.weight")


def _rooted(body: str, head: str) -> Callable[[str], str]:
    def spell(name: str) -> str:
        path = name.removeprefix(PREFIX)
        if path.startswith("model."):
            return PREFIX + body + path.removeprefix("model.")
        return PREFIX + head + path

    return spell


SPELLINGS: dict[str, Callable[[str], str]] = {
    "transformers without PEFT's prefix": lambda name: name.removeprefix(PREFIX),
    "with the adapter's name": _named_default,
    "with the adapter's name and no prefix": lambda name: _named_default(name.removeprefix(PREFIX)),
    "old wrapper of saved modules": lambda name: name.replace(
        "embed_tokens.weight", "embed_tokens.modules_to_save.weight"
    ),
    "magnitude as a weight": lambda name: name.replace("_vector", "_vector.weight"),
    "text half of a larger model": _rooted("model.language_model.", ""),
    "text half of a larger model, older": _rooted("language_model.model.", "language_model."),
    "text half without its wrapper": _rooted("language_model.", ""),
    "without the model around its layers": _rooted("", ""),
}


def spelled(tiny: TinyAdapter, spell: Callable[[str], str]) -> TinyAdapter:
    return TinyAdapter(tiny.config, {spell(name): t for name, t in tiny.tensors.items()})


@pytest.mark.parametrize("case", SPELLINGS)
def test_another_spelling_is_the_same_adapter(tmp_path: Path, case: str) -> None:
    standard = whole()
    other = spelled(standard, SPELLINGS[case])
    assert other.tensors.keys() != standard.tensors.keys()
    found = other.read(tmp_path / "other")
    assert found.digest == standard.read(tmp_path / "standard").digest
    assert found.module_names == ("q_proj", "up_proj", "embed_tokens", "lm_head")


def test_an_embedding_with_the_adapters_name_is_the_same_adapter(tmp_path: Path) -> None:
    standard = tiny_adapter("embed_tokens", "q_proj")
    other = spelled(
        standard,
        lambda name: f"{name}.default" if "embedding" in name else _named_default(name),
    )
    assert other.read(tmp_path / "a").digest == standard.read(tmp_path / "b").digest


def test_patterns_mean_the_paths_of_the_model_that_was_trained(tmp_path: Path) -> None:
    spell = SPELLINGS["text half of a larger model"]
    tiny = spelled(tiny_adapter("q_proj", "v_proj", lora_rank=4), spell)
    tiny.config |= {
        "r": 9,
        "target_modules": r"model\.language_model\.layers\.\d\.self_attn\.[qv]_proj",
        "rank_pattern": {r"^model\.language_model\.layers\.\d\..*": 4},
    }
    found = tiny.read(tmp_path / "fits")
    assert {module.lora_rank for module in found.modules} == {4}
    tiny.config["target_modules"] = r"model\.layers\.\d\.self_attn\.[qv]_proj"
    assert "leave no module" in reason(tiny.write(tmp_path / "misses"))


def _both(tiny: TinyAdapter) -> None:
    name = a_of(0, "q_proj")
    tiny.tensors[name.replace(".weight", ".default.weight")] = tiny.tensors[name]


def _mixed(tiny: TinyAdapter) -> None:
    name = a_of(0, "q_proj")
    tiny.tensors[name.removeprefix(PREFIX)] = tiny.tensors.pop(name)


def _head_of_another_root(tiny: TinyAdapter) -> None:
    name = a_of(0, "lm_head")
    tiny.tensors[name.replace("lm_head", "language_model.lm_head")] = tiny.tensors.pop(name)


def _unprefixed_head(tiny: TinyAdapter) -> None:
    name = a_of(0, "lm_head")
    tiny.tensors[name.removeprefix(PREFIX)] = tiny.tensors.pop(name)


def _other_name(tiny: TinyAdapter) -> None:
    name = a_of(0, "q_proj")
    tiny.tensors[name.replace(".weight", ".mine.weight")] = tiny.tensors.pop(name)


def _vision(tiny: TinyAdapter) -> None:
    name = "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight"
    tiny.tensors[name] = tiny.tensors[a_of(0, "q_proj")]


def _two_tables(tiny: TinyAdapter) -> None:
    name = table_of("embed_tokens")
    tiny.tensors[name.replace("weight", "modules_to_save.weight")] = tiny.tensors[name]


BAD: dict[str, tuple[Callable[[TinyAdapter], None], str]] = {
    "one tensor twice": (_both, "one tensor under two names: 'base_model.model.model.layers.0"),
    "one table twice": (_two_tables, "one tensor under two names: 'base_model.model.model.embed"),
    "with and without a prefix": (_mixed, "named in more than one way"),
    "a head with another root": (_head_of_another_root, "named in more than one way"),
    "a head without a prefix": (_unprefixed_head, "named in more than one way"),
    "another adapter's name": (_other_name, "no place among"),
    "a vision tower": (_vision, "no place among"),
}


@pytest.mark.parametrize("case", BAD)
def test_spellings_that_leave_a_doubt_are_refused(tmp_path: Path, case: str) -> None:
    spoil, told = BAD[case]
    tiny = whole()
    spoil(tiny)
    assert told in reason(tiny.write(tmp_path))


def test_a_file_with_nothing_but_a_head_is_read(tmp_path: Path) -> None:
    def read(spell: Callable[[str], str]) -> Adapter:
        return spelled(tiny_adapter("lm_head"), spell).read(tmp_path / spell("x"))

    standard = read(lambda name: name)
    assert standard.module_names == ("lm_head",)
    assert read(lambda name: name.removeprefix(PREFIX)).digest == standard.digest
    assert read(_rooted("", "language_model.")).digest == standard.digest
