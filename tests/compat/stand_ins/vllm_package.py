"""The package `vllm` that its tests import: a few stand-ins, and nothing else.

What is not here can be imported, and raises NeedsInternals when it is called: a case that does so
needs vLLM itself, and does not count.
"""

import base64
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(os.environ["COMPAT_SOURCE"])
DEMO = os.environ["COMPAT_MODEL"]
ADAPTERS = [Path(path) for path in os.environ["COMPAT_ADAPTERS"].split(os.pathsep)]
# These need nothing of vLLM but constants: they are read from its source package.
AS_THEY_ARE = ("vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils")

sys.modules.setdefault("pybase64", base64)


class NeedsInternals(Exception):
    """A test has called what is vLLM's own."""


class Internal:
    """Something of vLLM's, which may be named and not be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NeedsInternals(self._name)

    def __getattr__(self, name: str) -> "Internal":
        if name.startswith("__"):
            raise AttributeError(name)
        return Internal(f"{self._name}.{name}")

    def __getitem__(self, _: object) -> "Internal":
        return self

    def __iter__(self) -> Any:
        raise NeedsInternals(self._name)

    def __or__(self, _: object) -> "Internal":
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


class Answer:
    """A JSON object of an answer with its keys as attributes, as vLLM's response models have."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def model_validate(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            return cls({key: cls.model_validate(value) for key, value in fields.items()})
        return [cls.model_validate(one) for one in fields] if isinstance(fields, list) else fields

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name}: {self._fields}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and other._fields == self._fields

    def __repr__(self) -> str:
        return repr(self._fields)

    def model_dump(self, exclude: Sequence[str] = ()) -> dict[str, Any]:
        return {key: value for key, value in self._fields.items() if key not in exclude}


class _Platform:
    """Neither a GPU of a kind nor anything else that a test looks for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


class _Hub:
    """Adapters of the demo model in place of those that tests fetch."""

    def snapshot_download(self, repo_id: str, **_: Any) -> str:
        if repo_id not in _Hub.fetched:
            _Hub.fetched.append(repo_id)
        return str(ADAPTERS[_Hub.fetched.index(repo_id) % len(ADAPTERS)])

    fetched: list[str] = []


class ModelConfig:
    """The configuration of the demo model, whatever model is named."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._config = json.loads((Path(DEMO) / "config.json").read_text())

    def get_vocab_size(self) -> int:
        size: int = self._config["vocab_size"]
        return size


def get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.entrypoints.pooling.embed.protocol": {"EmbeddingResponse": Answer},
    "vllm.entrypoints.pooling.pooling.protocol": {"PoolingResponse": Answer},
    "vllm.entrypoints.pooling.classify.protocol": {"ClassificationResponse": Answer},
    "vllm.entrypoints.pooling.scoring.protocol": {
        "ScoreResponse": Answer,
        "RerankResponse": Answer,
    },
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda name, **_: name
    },
    "vllm.logger": {"init_logger": lambda name: None},
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Error"):
            return type(name, (NeedsInternals,), {})
        return Internal(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("vllm."):
            return None
        if name in AS_THEY_ARE:
            file = SOURCE / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(STAND_INS.get(module.__name__, {}))


sys.meta_path.insert(0, _Finder())
# Its unit tests of a server's parts, which a test of batches takes some from.
_UNIT_TESTS = "tests.entrypoints.openai.chat_completion.test_serving_chat"
sys.modules[_UNIT_TESTS] = _Module(_UNIT_TESTS)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Internal(f"vllm.{name}")
