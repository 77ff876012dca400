"""Every way in which DoRA, saved modules and LoRAs of the vocabulary can be wrong."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.adapters.tiny import (
    MODEL,
    TinyAdapter,
    a_of,
    b_of,
    magnitude_of,
    reason,
    table_of,
    tiny_adapter,
    with_dora,
    with_saved,
)

F32 = np.float32


def _tensor(name: str, value: Any) -> Callable[[TinyAdapter], None]:
    return lambda tiny: tiny.tensors.update({name: value})


def _drop(name: str) -> Callable[[TinyAdapter], None]:
    return lambda tiny: tiny.tensors.__delitem__(name)


V, H = MODEL.vocab_size, MODEL.hidden_size
BAD_KINDS: dict[str, tuple[Callable[[TinyAdapter], None], str]] = {
    "embedding A for more tokens": (
        _tensor(a_of(0, "embed_tokens"), np.ones((4, V + 2), F32)),
        r"embed_tokens\.lora_embedding_A is made for 66 tokens, this model has 64; adapters",
    ),
    "embedding B of another width": (
        _tensor(b_of(0, "embed_tokens"), np.ones((H + 1, 4), F32)),
        r"embed_tokens\.lora_embedding_B is \[28, 4\], must be \[27, 4\]; was the adapter trained",
    ),
    "embedding A of another rank": (
        _tensor(a_of(0, "embed_tokens"), np.ones((5, V), F32)),
        r"lora_embedding_A has lora_rank 5, but adapter_config\.json says 4",
    ),
    "embedding LoRA spelled as a linear one": (
        _tensor("base_model.model.model.embed_tokens.lora_A.weight", np.ones((4, V), F32)),
        r"no place .*embed_tokens\.lora_A\.weight",
    ),
    "magnitude of another length": (
        _tensor(magnitude_of(1, "q_proj"), np.ones(7, F32)),
        r"layers\.1\.self_attn\.q_proj\.lora_magnitude_vector is \[7\], must be \[36\]",
    ),
    "magnitude as a matrix": (
        _tensor(magnitude_of(1, "q_proj"), np.ones((1, 36), F32)),
        r"lora_magnitude_vector is \[1, 36\], must be \[36\]",
    ),
    "magnitude of the embedding by token": (
        _tensor(magnitude_of(0, "embed_tokens"), np.ones(V, F32)),
        r"embed_tokens\.lora_magnitude_vector is \[64\], must be \[27\]",
    ),
    "no magnitude": (
        _drop(magnitude_of(1, "q_proj")),
        r"missing tensors: .*layers\.1\.self_attn\.q_proj\.lora_magnitude_vector",
    ),
    "NaN in a magnitude": (
        _tensor(magnitude_of(0, "q_proj"), np.full(36, np.nan, F32)),
        r"NaN or infinity in .*layers\.0\.self_attn\.q_proj\.lora_magnitude_vector",
    ),
    "a magnitude where there is no LoRA": (
        _tensor(magnitude_of(0, "v_proj"), np.ones(12, F32)),
        r"no place .*v_proj\.lora_magnitude_vector",
    ),
    "saved head with more tokens": (
        _tensor(table_of("lm_head"), np.ones((V + 2, H), F32)),
        r"lm_head\.weight is made for 66 tokens, this model has 64; adapters that add tokens",
    ),
    "saved head of another width": (
        _tensor(table_of("lm_head"), np.ones((V, H - 1), F32)),
        r"lm_head\.weight is \[64, 26\], must be \[64, 27\]; was the adapter trained on another",
    ),
    "saved head as a vector": (
        _tensor(table_of("lm_head"), np.ones(V * H, F32)),
        r"lm_head\.weight is \[1728\], must be \[64, 27\]",
    ),
    "infinity in a saved head": (
        _tensor(table_of("lm_head"), np.full((V, H), np.inf, F32)),
        r"NaN or infinity in .*lm_head\.weight",
    ),
    "saved head and LoRA on it": (
        _tensor(a_of(0, "lm_head"), np.ones((4, H), F32)),
        r"no place .*lm_head\.lora_A\.weight",
    ),
    "base weight beneath the embedding with more tokens": (
        _tensor(table_of("embed_tokens", "base_layer.weight"), np.ones((V + 1, H), F32)),
        r"embed_tokens\.base_layer\.weight is made for 65 tokens, this model has 64",
    ),
    "base weight beneath a linear module": (
        _tensor(a_of(0, "q_proj").replace("lora_A", "base_layer"), np.ones((36, H), F32)),
        r"no place .*q_proj\.base_layer\.weight",
    ),
    "a bias of the head": (
        _tensor("base_model.model.lm_head.bias", np.ones(V, F32)),
        r"no place .*lm_head\.bias",
    ),
    "a trained norm": (
        _tensor("base_model.model.model.norm.weight", np.ones(H, F32)),
        r"no place .*model\.norm\.weight",
    ),
    "the base model's copy of a saved module": (
        _tensor(table_of("lm_head", "original_module.weight"), np.ones((V, H), F32)),
        r"no place .*lm_head\.original_module\.weight",
    ),
}


@pytest.mark.parametrize("case", BAD_KINDS)
def test_tensors_of_every_kind_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    spoil, told = BAD_KINDS[case]
    tiny = with_dora(with_saved(tiny_adapter("q_proj", "embed_tokens"), "lm_head"))
    assert tiny.read(tmp_path / "good").module_names == ("q_proj", "embed_tokens", "lm_head")
    spoil(tiny)
    message = reason(tiny.write(tmp_path / "bad"))
    assert re.search(told, message), message


def _tied(tiny: TinyAdapter) -> TinyAdapter:
    tiny.config["ensure_weight_tying"] = True
    return tiny


def test_tied_loras_that_differ_are_refused(tmp_path: Path) -> None:
    tiny = _tied(tiny_adapter("embed_tokens", "lm_head"))
    assert "makes 'base_model.model.model.embed_tokens.lora_embedding_A'" in reason(
        tiny.write(tmp_path / "apart")
    )
    tiny.tensors[a_of(0, "lm_head")] = tiny.tensors[b_of(0, "embed_tokens")].T.copy()
    tiny.tensors[b_of(0, "lm_head")] = tiny.tensors[a_of(0, "embed_tokens")].T.copy()
    assert tiny.read(tmp_path / "as_one").module_names == ("embed_tokens", "lm_head")
    del tiny.tensors[a_of(0, "lm_head")]
    assert "missing tensors: 'base_model.model.lm_head.lora_A.weight'" in reason(
        tiny.write(tmp_path / "half")
    )


def test_tied_saved_modules_that_differ_are_refused(tmp_path: Path) -> None:
    tiny = _tied(with_saved(tiny_adapter("q_proj"), "embed_tokens", "lm_head"))
    assert "are one weight in this model" in reason(tiny.write(tmp_path / "apart"))
    tiny.tensors[table_of("lm_head")] = tiny.tensors[table_of("embed_tokens")]
    assert len(tiny.read(tmp_path / "as_one").tables) == 2


def test_weights_beneath_two_loras_that_a_tied_model_makes_one_must_be_equal(
    tmp_path: Path,
) -> None:
    tiny = tiny_adapter("embed_tokens", "lm_head")
    with_saved(tiny, "embed_tokens", "lm_head", end="base_layer.weight")
    assert "base_layer.weight' are one weight in this model" in reason(tiny.write(tmp_path))
