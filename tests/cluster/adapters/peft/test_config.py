"""What adapter_config.json says of each module; any other text is refused in good order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.adapters.peft.config import parse_peft_config
from cluster.errors import InvalidAdapter
from tests import whole_modules
from worker.linears import separate_linears

BASIC: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "up_proj"],
}


def module_path(layer: int, module: str) -> str:
    """Return the path of a module of Llama."""
    return whole_modules.module_path(separate_linears(), layer, module)


def spelled(**keys: Any) -> bytes:
    """Return a valid configuration with some keys changed."""
    return json.dumps({**BASIC, **keys}).encode()


def test_the_first_pattern_that_matches_counts() -> None:
    config = parse_peft_config(
        spelled(
            rank_pattern={"layers.1.mlp.up_proj": 2, "up_proj": 4},
            alpha_pattern={"up_proj": 3, "layers.1.mlp.up_proj": 5},
        )
    )
    inner, outer = module_path(1, "up_proj"), module_path(10, "up_proj")
    assert (config.lora_rank_of(inner), config.scaling_of(inner)) == (2, 1.5)
    assert (config.lora_rank_of(outer), config.scaling_of(outer)) == (4, 0.75)
    assert config.scaling_of(module_path(1, "q_proj")) == 2.0


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("layers.1.self_attn.q_proj", True),
        ("model.layers.1.self_attn.q_proj", True),
        ("_proj", False),  # a part of a name
        ("1.self_attn", False),  # not at the end
        ("x.model.layers.1.self_attn.q_proj", False),  # longer than the path
        ("q.proj", True),  # a dot stands for anything
        (r"layers\.\d\..*", True),
        ("[qv]_proj", True),
        (".*_proj", True),
        (".*_PROJ", False),
        ("k_proj|q_proj", True),
    ],
)
def test_a_pattern_is_matched_as_peft_matches_it(pattern: str, matches: bool) -> None:
    config = parse_peft_config(spelled(rank_pattern={pattern: 3}))
    assert config.lora_rank_of(module_path(1, "q_proj")) == (3 if matches else 8)


@pytest.mark.parametrize(
    ("keys", "covered"),
    [
        ({}, ["0.q", "0.up", "1.q", "1.up"]),
        ({"target_modules": ["self_attn.q_proj"]}, ["0.q", "1.q"]),
        ({"target_modules": "all-linear"}, ["0.q", "0.up", "1.q", "1.up"]),
        ({"target_modules": r".*1.*_proj"}, ["1.q", "1.up"]),
        ({"target_modules": "q_proj"}, []),  # an expression must match the whole path
        ({"target_modules": ["proj"]}, []),
        ({"layers_to_transform": 1}, ["1.q", "1.up"]),
        ({"layers_to_transform": []}, ["0.q", "0.up", "1.q", "1.up"]),
        ({"exclude_modules": ["q_proj"]}, ["0.up", "1.up"]),
        ({"exclude_modules": r"model\.layers\.0\..*"}, ["1.q", "1.up"]),
    ],
)
def test_targets_cover_what_peft_would_adapt(keys: dict[str, Any], covered: list[str]) -> None:
    found = parse_peft_config(spelled(**keys)).targets
    assert covered == [
        f"{layer}.{module.removesuffix('_proj')}"
        for layer in (0, 1)
        for module in ("q_proj", "up_proj")
        if found.cover(module_path(layer, module))
    ]


def test_thousands_of_hostile_patterns_are_refused_before_any_is_matched() -> None:
    with pytest.raises(InvalidAdapter, match="9999 patterns, 0 of them regular"):
        parse_peft_config(spelled(rank_pattern={f"q{i}": 1 for i in range(9999)}))
    with pytest.raises(InvalidAdapter, match="cannot be used: it is longer than 2048"):
        parse_peft_config(spelled(target_modules="(a|b)*" * 999))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("q_proj.*()[]\\|0\ud800é", max_size=8)
    | st.sampled_from(["q_proj", "all-linear", "none", "LORA"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "use_dora"),
    *("init_lora_weights", "modules_to_save", "ensure_weight_tying", "something_else"),
)


@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=3))
def test_odd_values_are_taken_or_refused_in_good_order(keys: dict[str, Any]) -> None:
    try:
        config = parse_peft_config(spelled(**keys))
    except InvalidAdapter as error:
        assert error.message.isprintable()
        return
    for module in ("q_proj", "down_proj"):
        path = module_path(0, module)
        assert config.targets.cover(path) in (True, False)
        assert config.lora_rank_of(path) >= 1
        assert abs(config.scaling_of(path)) <= 1e6
