"""How the base model's makers say that it should be sampled: `generation_config.json`.

Owns which of its keys count, and what is a mistake in them. What a request says goes before all of
it; that its `eos_token_id` ends answers is known to `worker.model_config_reader`.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.api.schemas.requests import MinP, RepetitionPenalty, Temperature, TopK, TopP
from cluster.router.config import SamplingDefaults
from deploy.config import ServeConfig
from deploy.config_errors import ConfigError, one_line, shown
from worker.model_files import GENERATION, has_file, read_file
from worker.regular_file import read_bounded
from worker.weights.gguf.files import is_gguf

_MAX_BYTES = 2**22


class _GenerationConfig(BaseModel):
    """The keys that count, in the ranges of requests; null is as good as missing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    max_new_tokens: Annotated[int | None, Field(ge=1)] = None

    @property
    def said(self) -> dict[str, float | int]:
        """What is there."""
        return self.model_dump(exclude_none=True)


class _Override(_GenerationConfig):
    """The same of an operator, whose every key must count."""

    model_config = ConfigDict(extra="forbid")


def sampling_defaults(config: ServeConfig, model_dir: Path) -> SamplingDefaults:
    """Return how requests are sampled that do not say it themselves.

    Raises:
        ConfigError: naming the key at fault, if there is no such file, or nonsense in it.
    """
    said = _of_file(config.generation_config, model_dir)
    try:
        override = _Override.model_validate(config.override_generation_config)
    except ValidationError as error:
        raise ConfigError(f"override_generation_config: {_first(error)}") from error
    values = said | override.said
    max_tokens = values.pop("max_new_tokens", None)
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    return SamplingDefaults(**values, max_tokens=max_tokens)  # type: ignore[arg-type]


def shown_defaults(defaults: SamplingDefaults) -> str:
    """Return the defaults as one line for people."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    texts = [f"{name} {getattr(defaults, name):g}" for name in names]
    if defaults.max_tokens is not None:
        texts.append(f"max_tokens {defaults.max_tokens}")
    return "unless requests say otherwise: " + ", ".join(texts)


def _of_file(wanted: str, model_dir: Path) -> dict[str, float | int]:
    if wanted == "vllm":
        return {}
    path = model_dir if wanted == "auto" else Path(wanted).expanduser()
    is_model = path.is_dir() or is_gguf(path)
    if wanted == "auto" and not has_file(path, GENERATION):
        return {}
    shown_path = path / GENERATION if path.is_dir() else path
    try:
        read = partial(read_file, path, GENERATION) if is_model else partial(read_bounded, path)
        return _GenerationConfig.model_validate_json(read(_MAX_BYTES)).said
    except ValidationError as error:
        raise ConfigError(f"generation_config: {shown_path}: {_first(error)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config: {shown_path}: {one_line(error)}") from error


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(_GenerationConfig.model_fields)
        return f"{shown(key)[1:-1]} is not one of {known}"
    if not key:
        return one_line(first["msg"])
    return f"{key} {shown(first['input'])} will not do: {one_line(first['msg'])}"
