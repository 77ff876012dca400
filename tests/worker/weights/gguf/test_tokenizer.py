"""The tokenizer that a GGUF file says is the model's own: the same tokens of any text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from cluster.router.tokenizer import Tokenizer
from deploy.demo.model import DEFAULT_TARGET
from worker.model_files import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, read_file
from worker.weights.gguf.files import open_gguf
from worker.weights.gguf.tokenizer import tokenizer_document

TEXTS = (
    "Hello, world!  It's 2024, isn't it? WE'LL see: I'D say 12345678 times.",
    "def f(x):\n    return  x[1:]  # comment\n\n\n\tif True:\r\n\t\tpass   \n  1\n   22 x",
    "naïve café, größte Straße; ελληνικά, русский, 日本語のテキスト, 한국어, עברית, ไทย",
    "🤗🏳️‍🌈 👩‍👩‍👧 \u200b\u00a0\u3000 ½ Ⅷ ², e\u0301 \ufeff",
    "   leading and trailing   ",
    "<|im_start|>user\nhi<|im_end|> <|im_start| > <|endoftext|>",
    "camelCaseWords HTTPServer snake_case_2 x=3.14e-10;$%^&*()//",
    "",
)
Write = Callable[..., Path]


NUM_MERGES = 3000


def shortened() -> dict[str, Any]:
    """Return the demo model's tokenizer.json with the first of its merges."""
    tokenizer: dict[str, Any] = json.loads((DEFAULT_TARGET / TOKENIZER).read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    num_tokens = len(vocabulary) - len(merges) + NUM_MERGES
    kept = {token: number for token, number in vocabulary.items() if number < num_tokens}
    tokenizer["model"] |= {"vocab": kept, "merges": merges[:NUM_MERGES]}
    return tokenizer


def parts_of(tokenizer: dict[str, Any]) -> tuple[list[str], list[int], list[str]]:
    """Return tokens, their types and merges of a tokenizer.json, as the converter has them."""
    vocabulary = tokenizer["model"]["vocab"]
    added = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [3 if token in added else 1 for token in tokens]
    return tokens, types, [" ".join(pair) for pair in tokenizer["model"]["merges"]]


@pytest.fixture(scope="module")
def parts() -> tuple[list[str], list[int], list[str]]:
    return parts_of(shortened())


@pytest.fixture
def write(parts: tuple[list[str], list[int], list[str]], tmp_path: Path) -> Write:
    """Return a function that writes a file with the demo model's vocabulary."""

    def make(pre: str, **changes: Any) -> Path:
        tokens, types, merges = parts
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(8192)
        writer.add_tokenizer_model(changes.get("model", "gpt2"))
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(changes.get("tokens", tokens))
        writer.add_token_types(changes.get("types", types))
        writer.add_token_merges(changes.get("merges", merges))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        if "add_bos" in changes:
            writer.add_add_bos_token(changes["add_bos"])
        writer.add_chat_template(changes.get("template", "{{ messages[0].content }}"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


@pytest.mark.model
def test_digits_are_words_of_their_own_where_the_model_was_made_so(write: Write) -> None:
    right = Backend.from_str(json.dumps(shortened()))
    digits, words = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    right.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    found = Tokenizer.load(write("smollm"))
    for text in TEXTS:
        ids = found.encode(text, add_special_tokens=True)
        assert list(ids) == right.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False) == text


# Spaces before digits alone are cut in another way by what transformers makes of `smollm`.
@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_words_are_cut_as_transformers_cuts_them(write: Write, pre: str) -> None:
    path = write(pre, add_bos=False)
    architecture, told, _ = get_gguf_tokenizer(str(path))
    right, _ = convert_gguf_tokenizer(architecture, told)
    found = Backend.from_str(read_file(path, TOKENIZER).decode())
    for text in TEXTS:
        if pre == "qwen2" and "e\u0301" in text:
            continue  # which is é to the model's own tokenizer, and here
        assert found.encode(text).ids == right.encode(text, add_special_tokens=False).ids, text


@pytest.mark.model
def test_letters_and_accents_are_one_character_to_qwen(write: Write) -> None:
    found = Tokenizer.load(write("qwen2"))
    assert found.encode("e\u0301", False) == found.encode("\u00e9", False)


@pytest.mark.model
@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False),
     ("gpt-2", True, True)],
)  # fmt: skip
def test_a_text_begins_with_the_token_for_it_where_the_file_or_its_kind_says_so(
    write: Write, pre: str, add_bos: bool | None, begins: bool
) -> None:
    found = Tokenizer.load(write(pre, **({} if add_bos is None else {"add_bos": add_bos})))
    plain = found.encode("some text", add_special_tokens=False)
    assert found.encode("some text", add_special_tokens=True) == ((1,) if begins else ()) + plain


@pytest.mark.model
def test_templates_and_special_tokens_are_those_of_the_file(write: Write) -> None:
    found = Tokenizer.load(write("smollm", template="{{ eos_token }}{{ messages[0].content }}"))
    assert found.render([{"role": "user", "content": "x"}], True, False, {}) == "<|im_end|>x"
    info = found.info()
    assert (info["bos_token"], info["model_max_length"]) == ("<|im_start|>", 8192)
    hello = found.encode("hello", add_special_tokens=False)
    assert found.decode((1, *hello, 2), skip_special_tokens=True) == "hello"


@pytest.mark.model
def test_what_lies_beside_the_file_goes_before_it(write: Write) -> None:
    path = write("no-such-way")
    content = json.dumps(shortened()).encode()
    (path.parent / TOKENIZER).write_bytes(content)
    (path.parent / CHAT_TEMPLATE).write_text("beside")
    assert read_file(path, TOKENIZER) == content
    assert json.loads(read_file(path, TOKENIZER_CONFIG))["eos_token"] == "<|im_end|>"
    assert Tokenizer.load(path).render([{"role": "user", "content": "x"}], True, False, {}) == (
        "beside"
    )


@pytest.mark.model
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"pre": "default"},
            "ggml.pre: 'default' is not one of .*: put the model's tokenizer.json",
        ),
        ({"model": "llama"}, "ggml.model: 'llama' is not supported.*: put the model's"),
        ({"tokens": ["a", "a"], "types": [1, 1]}, "ggml.tokens: a stands twice"),
        ({"types": [1]}, "ggml.token_type: 1 types of 3252 tokens"),
        ({"merges": ["a"]}, "ggml.merges: a is not two tokens"),
        ({"pre": "gpt-2", "add_bos": True, "tokens": ["a"], "types": [1]}, "1 is not one of 1 tok"),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_refused_by_its_key(
    write: Write, changes: dict[str, Any], complaint: str
) -> None:
    path = write(**({"pre": "gpt-2"} | changes))
    with pytest.raises(ValueError, match=f"model.gguf: tokenizer.*{complaint}"):
        tokenizer_document(open_gguf(path))


@pytest.mark.model
def test_rows_that_are_no_tokens_are_none(
    write: Write, parts: tuple[list[str], list[int], list[str]]
) -> None:
    tokens, types, _ = parts
    path = write("smollm", tokens=[*tokens, "[PAD3252]"], types=[*types, 5])
    found = Tokenizer.load(path)
    assert found.num_tokens == len(tokens) and found.raw_token(len(tokens)) == ""
