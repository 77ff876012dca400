"""Loads a model's tokenizer as a router does, in a process of its own, and says what is wrong.

A process, because tokenizer and chat template come from strangers: neither a crash in the library
nor a template without an end reaches the command, nor does what the libraries write on stderr.
"""

import resource
import sys
from pathlib import Path

import msgspec
import tokenizers
from jinja2 import TemplateSyntaxError

from cluster.errors import InvalidRequest
from cluster.router.tokenizer import Tokenizer
from deploy.checks.tokenizer_check import Finding
from worker.model_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    folder_of,
    has_file,
    read_file,
)
from worker.regular_file import open_regular_file

CPU_SECONDS = 100  # after which the kernel ends the process, whoever waits for it
MAX_BYTES = 2**28  # of tokenizer.json
_TEXT = "Hello, who are you?"


def find(model: Path, vocab_size: int) -> Finding:
    """Return what is wrong with the tokenizer of a model with so many rows in its embedding."""
    try:
        if not has_file(model, TOKENIZER):
            return Finding(f"{model} has no {TOKENIZER}")
        for name in TOKENIZER_FILES:
            beside = folder_of(model) / name
            if beside.exists():
                with open_regular_file(beside) as (_, size):
                    if size > MAX_BYTES:
                        return Finding(f"{name} takes {size} bytes, over the limit of {MAX_BYTES}")
        return _load(model, read_file(model, TOKENIZER).decode(), vocab_size)
    except (OSError, ValueError) as error:
        return Finding(str(error))


def _load(model: Path, text: str, vocab_size: int) -> Finding:
    # Libraries that are given another thing than they expect raise whatever comes of it.
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        vocabulary = backend.get_vocab(with_added_tokens=True)
    except Exception as error:
        return Finding(f"{TOKENIZER} cannot be read: {error}")
    try:
        tokenizer = Tokenizer.load(model)
    except Exception as error:
        return Finding(
            f"{TOKENIZER} and {TOKENIZER_CONFIG} cannot be loaded: {type(error).__name__}: {error}"
        )
    last = max(vocabulary.values(), default=-1)
    num_tokens = max(last + 1, tokenizer.num_tokens)
    if num_tokens > vocab_size:
        words = ", ".join(sorted(ascii(t) for t, i in vocabulary.items() if i >= vocab_size)[:3])
        return Finding(
            f"it has token ids up to {num_tokens - 1}, and the model's embedding only "
            f"{vocab_size} rows (vocab_size)" + (f"; too many are {words}" if words else "")
        )
    try:
        tokenizer.decode(tokenizer.encode(_TEXT, add_special_tokens=True), True)
    except Exception as error:
        return Finding(f"it cannot encode a sentence: {error}")
    return _render(tokenizer)


def _render(tokenizer: Tokenizer) -> Finding:
    """Try the chat template on a plain conversation, which few good ones refuse."""
    if not tokenizer.has_chat_template:
        return Finding()
    try:
        tokenizer.render([{"role": "user", "content": _TEXT}], True, False, {})
    except InvalidRequest as error:
        cause = error.__cause__
        if isinstance(cause, TemplateSyntaxError):
            where = f"line {cause.lineno}: {cause.message}"
            return Finding(f"the chat template does not compile: {where}")
        return Finding(warning=f"{error.message}, of a plain question of a user")
    except Exception as error:
        return Finding(warning=f"the chat template fails: {type(error).__name__}: {error}")
    return Finding()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    found = find(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found))  # on a line of its own, the last
