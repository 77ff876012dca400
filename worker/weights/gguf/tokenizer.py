"""Says what a GGUF file says of its tokenizer as Hugging Face's `tokenizer.json` would.

Byte-level BPE alone (`tokenizer.ggml.model` "gpt2"), and of that the ways to cut a text into words
that are known by name (`tokenizer.ggml.pre`): a vocabulary says nothing of them, and another way
gives other tokens. What each name stands for is what the models' own tokenizer.json has, by which
llama.cpp's converter tells them (get_vocab_base_pre in conversion/base.py, src/llama-vocab.cpp).
"""

import re
from dataclasses import dataclass
from typing import Any

from worker.weights.gguf.files import Gguf
from worker.weights.safetensors_header import shown

Document = dict[str, Any]

_TOKENS, _TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
_MERGES, _MODEL, _PRE = "tokenizer.ggml.merges", "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens
_PADDING = re.compile(r"\[PAD\d+\]")  # rows of the embedding that are no tokens
_BESIDE = "put the model's tokenizer.json beside the file"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEHIND = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEHIND_CASES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_letters(numbers: str) -> str:
    return _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + _BEHIND


def _by_cases(numbers: str, contractions: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    words = (
        f"{before}{_UPPER}*{_LOWER}+{contractions}",
        f"{before}{_UPPER}+{_LOWER}*{contractions}",
    )
    return "|".join((*words, numbers)) + _BEHIND_CASES


@dataclass(frozen=True, slots=True)
class _Words:
    """How a text is cut into words, inside which tokens are merged."""

    split: str | None = None  # an expression that words match; None: GPT-2's
    digits_alone: bool = False  # each is a word, before anything else
    normalizer: str | None = None
    whole_words: bool = False  # one that is a token is that one, whatever could be merged
    begins: bool = False  # with the token for it, where the file says nothing of that


_GPT2 = _Words()
_LLAMA3 = _Words(_by_letters(r"\p{N}{1,3}"), whole_words=True, begins=True)
_DIGITS = _Words(digits_alone=True)
_WORDS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "dbrx": _Words(_by_letters(r"\p{N}{1,3}")),
    "qwen2": _Words(_by_letters(r"\p{N}"), normalizer="NFC"),
    "tekken": _Words(_by_cases(r"\p{N}", ""), whole_words=True, begins=True),
    "gpt-4o": _Words(_by_cases(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")),
}


def tokenizer_document(gguf: Gguf) -> Document:
    """Return what `tokenizer.json` of the same model says.

    Raises:
        ValueError: if it is of a kind that cannot be said so; names the key, and what to do.
    """
    model = gguf.text(_MODEL)
    if model != "gpt2":
        raise gguf.refusal(_MODEL, f"{model[:99]!r} is not supported, gpt2 is: {_BESIDE}")
    pre = gguf.text(_PRE)
    words = _WORDS.get(pre)
    if words is None:
        known = ", ".join(_WORDS)
        raise gguf.refusal(_PRE, f"{pre[:99]!r} is not one of {known}: {_BESIDE}")
    tokens, types = _tokens(gguf)
    return {
        "version": "1.0",
        "added_tokens": _added(tokens, types),
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": _pre_tokenizer(words),
        "post_processor": _post_processor(gguf, tokens, words),
        "decoder": _byte_level(with_words=True),
        "model": {
            "type": "BPE",
            "ignore_merges": words.whole_words,
            "vocab": _vocabulary(gguf, tokens, types),
            "merges": [_merge(gguf, merge) for merge in gguf.texts(_MERGES)],
        },
    }


def tokenizer_config_document(gguf: Gguf) -> Document:
    """Return what `tokenizer_config.json` of the same model says: special tokens and templates.

    Raises:
        ValueError: if a key is not what it must be; names it.
    """
    tokens = gguf.texts(_TOKENS)
    document: Document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.integer(f"{gguf.text('general.architecture')}.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (whole := f"tokenizer.ggml.{key}_token_id") in gguf:
            document[f"{name}_token"] = _token(gguf, whole, tokens)
    templates = {}
    if _TEMPLATE in gguf:
        templates["default"] = gguf.text(_TEMPLATE)
    for name in gguf.texts(_TEMPLATES) if _TEMPLATES in gguf else ():
        templates[name] = gguf.text(f"{_TEMPLATE}.{name}")
    if templates.keys() == {"default"}:
        document["chat_template"] = templates["default"]
    elif templates:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        document["chat_template"] = named
    return document


def _tokens(gguf: Gguf) -> tuple[list[str], list[int]]:
    tokens, types = gguf.texts(_TOKENS), gguf.integers(_TYPES)
    if len(tokens) != len(types):
        raise gguf.refusal(_TYPES, f"{len(types)} types of {len(tokens)} tokens")
    return tokens, types


def _vocabulary(gguf: Gguf, tokens: list[str], types: list[int]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED and _PADDING.fullmatch(token):
            continue
        if token in vocabulary:
            raise gguf.refusal(_TOKENS, f"{shown(token)} stands twice")
        vocabulary[token] = number
    return vocabulary


def _added(tokens: list[str], types: list[int]) -> list[Document]:
    """Return the tokens that a text is cut at before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **flags, "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]


def _merge(gguf: Gguf, merge: str) -> list[str]:
    pair = merge.split(" ")
    if len(pair) != 2:
        raise gguf.refusal(_MERGES, f"{shown(merge)} is not two tokens")
    return pair


def _byte_level(*, with_words: bool) -> Document:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": with_words,
    }


def _pre_tokenizer(words: _Words) -> Document:
    steps: list[Document] = []
    if words.digits_alone:
        steps.append({"type": "Digits", "individual_digits": True})
    if words.split is not None:
        pattern = {"Regex": words.split}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append(_byte_level(with_words=words.split is None))
    return {"type": "Sequence", "pretokenizers": steps}


def _post_processor(gguf: Gguf, tokens: list[str], words: _Words) -> Document:
    """Return what stands before and behind each text, where special tokens are asked for."""
    before: list[str] = []
    behind: list[str] = []
    special: Document = {}
    for name, default, side in (("bos", words.begins, before), ("eos", False, behind)):
        if gguf.flag(f"tokenizer.ggml.add_{name}_token", default):
            key = f"tokenizer.ggml.{name}_token_id"
            token = _token(gguf, key, tokens)
            side.append(token)
            special[token] = {"id": token, "ids": [gguf.integer(key)], "tokens": [token]}

    def around(sequence: str, type_id: int) -> list[Document]:
        first, last = (
            [{"SpecialToken": {"id": token, "type_id": type_id}} for token in side]
            for side in (before, behind)
        )
        return [*first, {"Sequence": {"id": sequence, "type_id": type_id}}, *last]

    single, second = around("A", 0), around("B", 1)
    template = {"type": "TemplateProcessing", "single": single, "pair": [*single, *second]}
    return template | {"special_tokens": special}


def _token(gguf: Gguf, key: str, tokens: list[str]) -> str:
    number = gguf.integer(key)
    if not 0 <= number < len(tokens):
        raise gguf.refusal(key, f"{number} is not one of {len(tokens)} tokens")
    return tokens[number]
