"""Every way in which an adapter can be wrong, and the key that its refusal must name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.errors import InvalidAdapter
from tests.cluster.adapters.tiny import TinyAdapter, a_of, b_of, reason, tiny_adapter


def _tensor(name: str, value: Any) -> Callable[[TinyAdapter], None]:
    return lambda tiny: tiny.tensors.update({name: value})


def _drop(*names: str) -> Callable[[TinyAdapter], None]:
    def spoil(tiny: TinyAdapter) -> None:
        for name in names:
            del tiny.tensors[name]

    return spoil


def _poison(value: float) -> Callable[[TinyAdapter], None]:
    def spoil(tiny: TinyAdapter) -> None:
        tiny.tensors[b_of(1, "v_proj")][3, 1] = value

    return spoil


F32 = np.float32
BAD_TENSORS: dict[str, tuple[Callable[[TinyAdapter], None], str]] = {
    "A with too few inputs": (
        _tensor(a_of(0, "q_proj"), np.ones((4, 16), F32)),
        r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is \[4, 16\], must be \[4, 27\]",
    ),
    "B of another base model": (
        _tensor(b_of(0, "q_proj"), np.ones((99, 4), F32)),
        r"q_proj\.lora_B\.weight is \[99, 4\], must be \[36, 4\]; was the adapter trained on",
    ),
    "A with another rank": (
        _tensor(a_of(0, "q_proj"), np.ones((8, 27), F32)),
        r"q_proj\.lora_A\.weight has lora_rank 8, but adapter_config\.json says 4",
    ),
    "one dimension": (_tensor(a_of(0, "q_proj"), np.ones(108, F32)), r"is \[108\], must be"),
    "three dimensions": (
        _tensor(a_of(0, "q_proj"), np.ones((4, 27, 1), F32)),
        r"is \[4, 27, 1\], must be",
    ),
    "empty": (_tensor(a_of(0, "q_proj"), np.ones((0, 27), F32)), "has lora_rank 0"),
    "double precision": (
        _tensor(a_of(0, "q_proj"), np.ones((4, 27))),
        "'F64'; LoRA tensors must be BF16, F16 or F32",
    ),
    "whole numbers": (_tensor(a_of(0, "q_proj"), np.ones((4, 27), np.int32)), "'I32'"),
    "NaN": (_poison(float("nan")), r"NaN or infinity in .*layers\.1\.self_attn\.v_proj\.lora_B"),
    "infinity": (_poison(float("-inf")), r"NaN or infinity in .*layers\.1\.self_attn\.v_proj"),
    "missing A": (_drop(a_of(1, "v_proj")), r"missing tensors: .*layers\.1.*v_proj\.lora_A"),
    "missing B": (_drop(b_of(1, "v_proj")), r"missing tensors: .*layers\.1.*v_proj\.lora_B"),
    "missing module": (
        _drop(a_of(1, "v_proj"), b_of(1, "v_proj")),
        r"missing tensors: .*v_proj\.lora_A.*v_proj\.lora_B",
    ),
    "unknown module": (
        _tensor("base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight", np.ones(1, F32)),
        "tensors with no place .*z_proj",
    ),
    "module in the wrong block": (
        _tensor("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", np.ones(1, F32)),
        r"tensors with no place .*mlp\.q_proj",
    ),
    "layer out of range": (
        _tensor(a_of(99, "q_proj"), np.ones((4, 27), F32)),
        r"no place .*of 2 layers: .*layers\.99\.self_attn\.q_proj",
    ),
    "layer with a leading zero": (
        _tensor(a_of(0, "q_proj").replace(".0.", ".00."), np.ones((4, 27), F32)),
        r"tensors with no place .*layers\.00\.",
    ),
    "module that the config does not target": (
        _tensor(a_of(0, "k_proj"), np.ones((4, 27), F32)),
        r"no place among what adapter_config\.json targets .*k_proj",
    ),
    "DoRA magnitudes without DoRA": (
        _tensor(
            a_of(0, "q_proj").replace("lora_A.weight", "lora_magnitude_vector"), np.ones(36, F32)
        ),
        "lora_magnitude_vector",
    ),
    "a trained head that the config does not save": (
        _tensor("base_model.model.lm_head.weight", np.ones((64, 27), F32)),
        r"no place .*lm_head\.weight",
    ),
    "name with control characters": (
        _tensor("\x1b[2J\n" + "x" * 9999, np.ones(1, F32)),
        r"no place .*'\\x1b\[2J\\nxxx",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    spoil, told = BAD_TENSORS[case]
    tiny = tiny_adapter("q_proj", "v_proj")
    spoil(tiny)
    message = reason(tiny.write(tmp_path))
    assert re.search(told, message), message
    assert message.isprintable() and len(message) < 1500


BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3', not 'LORA'"),
    "no method": ({"peft_type": None}, "peft_type is None"),
    "DoRA without magnitudes": (
        {"use_dora": True},
        r"missing tensors: .*layers\.0\.self_attn\.q_proj\.lora_magnitude_vector",
    ),
    "DoRA as text": ({"use_dora": "yes"}, "use_dora is 'yes', not true or false"),
    "lora_bias": ({"lora_bias": True}, "not supported: 'lora_bias'"),
    "bias": ({"bias": "all"}, "bias is 'all'"),
    "a saved module that is not there": (
        {"modules_to_save": ["lm_head"]},
        r"missing tensors: 'base_model\.model\.lm_head\.weight'",
    ),
    "other saved modules": (
        {"modules_to_save": ["lm_head", "norm", "head"]},
        "modules_to_save names 'norm', 'head'; only embed_tokens, lm_head and score can be served",
    ),
    "a saved linear module": ({"modules_to_save": ["q_proj"]}, "modules_to_save names 'q_proj'"),
    "saved modules as text": ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', not"),
    "saved modules as numbers": ({"modules_to_save": [1]}, r"modules_to_save is \[1\], not a list"),
    "trained tokens": ({"trainable_token_indices": [1]}, "'trainable_token_indices'"),
    "trained parameters": ({"target_parameters": ["a"]}, "target_parameters names"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "not supported: 'fan_in_fan_out'"),
    "activated LoRA": ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens'"),
    "megatron": ({"megatron_config": {"a": 1}}, "not supported: 'megatron_config'"),
    "layer replication": ({"layer_replication": [[0, 1]]}, "'layer_replication'"),
    "a key of the future": ({"use_magic": 1, "also": "x"}, "not supported: 'also', 'use_magic'"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    "no rank": ({"r": None}, "r is None"),
    "rank zero": ({"r": 0}, "r is 0"),
    "rank true": ({"r": True}, "r is True"),
    "rank as text": ({"r": "4"}, "r is '4'"),
    "rank over the limit": ({"r": 17}, "lora_rank 17 .* is over this server's limit of 16; raise"),
    "rank over the limit in a pattern": (
        {"rank_pattern": {"layers.1.self_attn.q_proj": 64}},
        "lora_rank 64 .*rank_pattern.* is over",
    ),
    "rank that is not the tensors'": ({"r": 8}, "has lora_rank 4, but adapter_config.json says 8"),
    "alpha as text": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "alpha huge": ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    "alpha infinite": ({"lora_alpha": 1e999}, "Infinity is not JSON"),
    "rslora as text": ({"use_rslora": "yes"}, "use_rslora is 'yes', not true or false"),
    "no targets": ({"target_modules": None}, "target_modules is missing or empty"),
    "unknown targets": (
        {"target_modules": ["q_proj", "v_proj", "c_attn", "head"]},
        "target_modules names .*: 'c_attn', 'head'; supported are q_proj",
    ),
    "targets that match nothing": ({"target_modules": r".*\.w_proj"}, "leave no module"),
    "targets all excluded": ({"exclude_modules": ["q_proj", "v_proj"]}, "leave no module"),
    "targets of wrong type": ({"target_modules": [["q_proj"]]}, "target_modules holds"),
    "targets as a map": ({"target_modules": {"q_proj": 1}}, "target_modules is not a list"),
    "hostile expression": ({"target_modules": "(?=q)" * 9}, "target_modules: .* cannot be used"),
    "layers of wrong type": ({"layers_to_transform": ["1"]}, "layers_to_transform holds '1'"),
    "layers of another model": ({"layers_pattern": "h"}, "layers_pattern is 'h'"),
    "layers beside an expression": (
        {"target_modules": r".*[qv]_proj", "layers_to_transform": [0]},
        "layers_to_transform cannot go with",
    ),
    "a layer without tensors": ({"layers_to_transform": [0]}, r"no place .*layers\.1\."),
    "rank_pattern as a list": ({"rank_pattern": [1]}, "rank_pattern is not a map"),
    "rank_pattern of text": ({"rank_pattern": {"q_proj": "x"}}, r"rank_pattern\['q_proj'\] is 'x'"),
    "rank_pattern beyond the subset": (
        {"rank_pattern": {r"(q)\1": 2}},
        r"rank_pattern: .* cannot be used: .* is not supported",
    ),
    "alpha_pattern that closes our group": (
        {"alpha_pattern": {"q)|(v": 2}},
        "alpha_pattern: .* cannot be used: a '\\)' closes no group",
    ),
    "too many expressions": (
        {"rank_pattern": {f"q+{i}": 1 for i in range(33)}},
        "33 of them regular expressions; the limits are 4096 and 32",
    ),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_a_config_that_cannot_be_served_is_refused_by_key(tmp_path: Path, case: str) -> None:
    keys, told = BAD_KEYS[case]
    tiny = tiny_adapter("q_proj", "v_proj")
    tiny.config.update(keys)
    with pytest.raises(InvalidAdapter, match=told):
        tiny.read(tmp_path)
