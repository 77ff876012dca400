"""The tokens of a model as llguidance gets them.

Read as it is, tokenizer.json cuts a text that spells a special token (`<|im_end|>`, `<think>`) into
that token, which no grammar allows where a text is meant. Here every text is cut into ordinary
tokens, and special ones keep their names: a grammar asks for `<|im_end|>` without quotes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from worker.model_files import TOKENIZER, read_file


def read_tokens(model_dir: Path, num_tokens: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokens of a model, whose logits have a row of `num_tokens`."""
    text = read_file(model_dir, TOKENIZER).decode()
    eos = list(eos_token_ids)
    tokens: Any = _Tokens(text, LLTokenizer(text, n_vocab=num_tokens, eos_token=eos), num_tokens)
    return LLTokenizer(tokens, eos_token=eos)


class _Tokens:
    """What llguidance asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, text: str, read: LLTokenizer, num_tokens: int) -> None:
        numbers = range(num_tokens)
        self.eos_token_id = read.eos_token
        self.tokens = [bytes(read.decode_bytes([number])) for number in numbers]
        self.special_token_ids = [one for one in numbers if read.is_special_token(one)]
        self._tokenizer = _of_plain_text(json.loads(text), frozenset(self.special_token_ids))

    def __call__(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


def _of_plain_text(loaded: dict[str, Any], special: frozenset[int]) -> Tokenizer:
    """Return what cuts the middle of a text, in which no special token is seen."""
    for token in loaded.get("added_tokens") or ():
        token["special"] = token["id"] in special
    for part in _parts(loaded.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Metaspace":  # a space in front of the text would be one too many
            part["prepend_scheme"] = "never"
    normalizer = loaded.get("normalizer")
    if normalizer and normalizer["type"] == "Prepend":
        loaded["normalizer"] = None
    elif normalizer and normalizer["type"] == "Sequence":
        kept = [one for one in normalizer["normalizers"] if one["type"] != "Prepend"]
        normalizer["normalizers"] = kept
    tokenizer = Tokenizer.from_str(json.dumps(loaded))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _parts(one: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if not one:
        return []
    return [one] if one["type"] != "Sequence" else list(one[key])
