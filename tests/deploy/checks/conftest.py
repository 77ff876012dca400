"""What tests of checks share: a tokenizer of the same files is looked at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.checks import start_check
from deploy.checks.tokenizer_check import Finding, looking_at_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_findings: dict[tuple[object, ...], Finding] = {}


def _files_of(directory: Path) -> tuple[bytes | None, ...]:
    return tuple(
        (directory / name).read_bytes() if (directory / name).is_file() else None for name in FILES
    )


@contextmanager
def looking_once(
    model_dir: Path, vocab_size: int, timeout: float
) -> Iterator[Callable[[], Finding]]:
    """Look as the command does, or say what was found of a tokenizer with the same files.

    A process that imports transformers takes two seconds of a core. What a GGUF file says of its
    own is looked at each time.
    """
    if not model_dir.is_dir():
        with looking_at_tokenizer(model_dir, vocab_size, timeout) as result:
            yield result
        return
    key = (*_files_of(model_dir), vocab_size, timeout)
    if key in _findings:
        yield lambda: _findings[key]
        return
    with looking_at_tokenizer(model_dir, vocab_size, timeout) as result:
        yield lambda: _findings.setdefault(key, result())


@pytest.fixture(autouse=True)
def same_tokenizers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_check, "looking_at_tokenizer", looking_once)
