"""How the model's own configuration makes embeddings of prompts, as sentence-transformers reads it.

`modules.json` names the modules behind the transformer, `1_Pooling/config.json` how to pool. A
model without them is a decoder: its last token has seen all others, and vectors are normalised.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.model_files import CONFIG, folder_of, read_file
from worker.protocol import Pooling

_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """What becomes of a prompt's hidden states."""

    hidden_size: int
    pooling: Pooling = "last"  # "": no embeddings, for `refusal`
    normalize: bool = True
    dimensions: tuple[int, ...] | None = None  # that vectors can be cut to; (): any; None: none
    refusal: str = ""

    @classmethod
    def read(cls, model_dir: Path) -> "PoolingConfig":
        """Read what a model says; what cannot be served is said by `refusal`."""
        config = _object(read_file(model_dir, CONFIG), CONFIG)
        hidden_size = config["hidden_size"]
        try:
            dimensions = _dimensions(config)
            pooling, normalize = _pooling(folder_of(model_dir))
        except (OSError, ValueError, RecursionError) as error:
            return cls(hidden_size, "", refusal=str(error))
        return cls(hidden_size, pooling, normalize, dimensions)


def _pooling(model_dir: Path) -> tuple[Pooling, bool]:
    if not (model_dir / "modules.json").exists():
        return "last", True
    modules = json.loads((model_dir / "modules.json").read_bytes())
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError("modules.json of the model is no list of modules")
    pooling: Pooling = "last"
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            path = _folder(model_dir, module) / CONFIG
            pooling = _mode(_object(path.read_bytes(), path.name))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(f"modules.json of the model names {kind[:100]!r}, which is not served")
    return pooling, normalize


def _mode(config: Mapping[str, Any]) -> Pooling:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if isinstance(config.get("pooling_mode"), str):  # newer files
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(
            f"the model pools by {', '.join(modes)[:200] or 'nothing'}; its last token or the mean "
            "of its tokens can be served"
        )
    if config.get("include_prompt") is False:
        raise ValueError("the model leaves instructions out of the mean, which is not served")
    return _POOLINGS[modes[0]]


def _folder(model_dir: Path, module: Mapping[str, Any]) -> Path:
    folder = (model_dir / str(module.get("path", ""))).resolve()
    if not folder.is_relative_to(model_dir.resolve()):
        raise ValueError("modules.json of the model leads out of its directory")
    return folder


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    given = config.get("matryoshka_dimensions")
    if given is None:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(given, list) or not all(type(one) is int and one > 0 for one in given):
        raise ValueError("matryoshka_dimensions of the model is no list of sizes")
    return tuple(sorted(given))


def _object(text: bytes, name: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{name} of the model is no JSON object")
    return value
