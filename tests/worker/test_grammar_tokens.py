"""worker.grammar_tokens: what spells a special token stays a text, all else is cut as before."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.end_to_end.server import MODEL_DIR
from worker.grammar_tokens import read_tokens

TEXTS = ('{"name": "', " so it is", "it  is\n\tso", "naïve 🐲", "so", "")
SPECIAL = ("<s>", "<think>", "[CALL]", "<unk>")


def of_pieces(directory: Path, normalizer: Any, pre_tokenizer: Any) -> Path:
    """Save a tokenizer in the manner of SentencePiece, with byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *'{}":,soitnaïve', "so", "▁so", "it", "▁it", "is", "▁is", "name"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("s", "o"), ("▁", "so"), ("i", "t"), ("▁", "it"), ("i", "s"), ("▁", "is")]
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    raw.normalizer, raw.pre_tokenizer = normalizer, pre_tokenizer
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    raw.add_special_tokens(["<s>", "</s>", "<unk>", "[CALL]"])
    raw.add_tokens([AddedToken("<think>", normalized=False)])
    raw.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
        (
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")]),
        ),
    ],
    ids=["metaspace", "prepend", "sequence"],
)
def test_pieces_are_cut_as_in_the_middle_of_a_text(
    tmp_path: Path, normalizer: Any, pre_tokenizer: Any
) -> None:
    model_dir = of_pieces(tmp_path, normalizer, pre_tokenizer)
    raw = LLTokenizer(str(model_dir / "tokenizer.json"), n_vocab=400, eos_token=[2])
    made = read_tokens(model_dir, 400, (2,))
    check(made, raw, 400)


@pytest.mark.model
def test_a_real_tokenizer_cuts_as_before() -> None:
    raw = LLTokenizer(str(MODEL_DIR / "tokenizer.json"), n_vocab=49160, eos_token=[2, 0])
    made = read_tokens(MODEL_DIR, 49160, (2, 0))
    check(made, raw, 49160)
    loaded = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    assert len(loaded["added_tokens"]) > 10
    for token in loaded["added_tokens"]:
        assert token["id"] not in made.tokenize_str(token["content"])


def check(made: LLTokenizer, raw: LLTokenizer, num_tokens: int) -> None:
    assert made.eos_tokens == raw.eos_tokens
    assert made.vocab_size == raw.vocab_size == num_tokens
    for number in range(num_tokens):
        assert made.decode_bytes([number]) == raw.decode_bytes([number])
        assert made.is_special_token(number) == raw.is_special_token(number)
    for text in TEXTS:
        assert made.tokenize_str(text) == raw.tokenize_str(text), text
    for text in SPECIAL:
        cut = made.tokenize_str(f"so {text} it")
        assert made.decode_str(cut) == f"so {text} it"
        assert not any(map(made.is_special_token, cut))
