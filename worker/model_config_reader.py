"""Reads a `ModelConfig` from `config.json` and `generation_config.json` of a model.

Anything that neither this reader nor the model's family understands is refused with the key that
says so: a model is never served on a guess.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from worker.classifier_config import ClassifierConfig, read_classifier, read_num_labels
from worker.model_config import ModelConfig
from worker.model_files import CONFIG, GENERATION, has_file, read_file
from worker.models.config_file import ConfigFile, require
from worker.models.registry import family_by_architecture
from worker.quantization.config import read_quantization
from worker.weights.gguf.files import is_gguf
from worker.weights.tensor_names import language_model_name

_MAX_BYTES = 2**22  # of a file
# A model with one of these keys is of a kind that not every family's forward pass computes.
_FOREIGN_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "num_shared_experts",
    "logit_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

# What a multimodal model's file says once for all that it consists of.
_OF_THE_WHOLE = (
    "architectures",
    "quantization_config",
    "compression_config",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class _Architectures(msgspec.Struct):
    """The part of `config.json` that names the family."""

    architectures: list[str]


class _Generation(msgspec.Struct):
    """The part of `generation_config.json` that matters here."""

    eos_token_id: int | list[int] | None = None


def read_model_config(model_dir: Path) -> ModelConfig:
    """Return the shape of the model in a directory, or of a GGUF file.

    Raises:
        OSError: if there is no `config.json`, or it cannot be read.
        ValueError: if the model is of a kind that cannot be served; names the key that says so.
    """
    keys = _decode(model_dir, CONFIG)
    if not is_gguf(model_dir):
        return _of_keys(model_dir, keys)
    try:
        return _of_keys(model_dir, keys)
    except ValueError as error:
        raise ValueError(f"{model_dir.name}: its metadata as {error}") from error


def _of_keys(model_dir: Path, keys: dict[str, Any]) -> ModelConfig:
    name = _architecture(keys)
    family = family_by_architecture().get(name)
    if family is None:
        raise ValueError(
            f"architectures: {name} is not one of {', '.join(family_by_architecture())}; "
            "docs/models.md tells more of them"
        )
    is_multimodal = name == family.multimodal
    if is_multimodal:
        keys = _language_model(keys)
    quantization = None
    if not family.knows("quantization_config"):
        written = keys.get("quantization_config", keys.get("compression_config"))
        quantization = None if written is None else read_quantization(written)
        is_other = quantization is not None and quantization.format is None
        require(is_gguf(model_dir) or not is_other, "quant_method gguf is of a GGUF file")
        if quantization is not None and is_multimodal:
            kept = frozenset(map(language_model_name, quantization.kept))
            quantization = replace(quantization, kept=kept)
    for key in _FOREIGN_KEYS:
        require(family.knows(key) or keys.get(key) is None, f"{key} is not supported")
    try:
        file = msgspec.convert(keys, family.file)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from error
    config = family.read(file)
    is_classifier = name == family.classifier
    return replace(
        config,
        family=family.name,
        is_multimodal=is_multimodal,
        quantization=quantization,
        tie_word_embeddings=config.tie_word_embeddings and not is_classifier,
        eos_token_ids=_eos_token_ids(model_dir, file),
        pad_token_id=_pad_token_id(keys),
        classifier=_classifier(keys) if is_classifier else None,
    )


def _architecture(keys: dict[str, Any]) -> str:
    try:
        names = msgspec.convert(keys, _Architectures).architectures
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {error}") from error
    require(len(names) == 1, f"architectures {names} is not one name")
    return names[0]


def _language_model(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a multimodal model's language model as if it were a model of its own."""
    nested = keys.get("text_config")
    if not isinstance(nested, dict):
        raise ValueError("config.json: text_config is missing or no object")
    return nested | {key: keys[key] for key in _OF_THE_WHOLE if key in keys}


def _decode(model_dir: Path, name: str) -> dict[str, Any]:
    data = read_file(model_dir, name, _MAX_BYTES)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from error


def _eos_token_ids(model_dir: Path, file: ConfigFile) -> tuple[int, ...]:
    """Return every token that ends an answer, of either file, in ascending order."""
    token_ids = set(_as_list(file.eos_token_id))
    if has_file(model_dir, GENERATION):
        try:
            generation = msgspec.convert(_decode(model_dir, GENERATION), _Generation)
        except msgspec.ValidationError as error:
            raise ValueError(f"{GENERATION}: {error}") from error
        token_ids.update(_as_list(generation.eos_token_id))
    for token_id in token_ids:
        require(0 <= token_id < file.vocab_size, f"eos_token_id {token_id} is not a token")
    return tuple(sorted(token_ids))


def _pad_token_id(keys: dict[str, Any]) -> int | None:
    value = keys.get("pad_token_id")
    return value if type(value) is int else None


def _classifier(keys: dict[str, Any]) -> ClassifierConfig:
    try:
        return read_classifier(keys, read_num_labels(keys))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from error


def _as_list(token_ids: int | list[int] | None) -> list[int]:
    if token_ids is None:
        return []
    return token_ids if isinstance(token_ids, list) else [token_ids]
