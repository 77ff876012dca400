"""Bad words and allowed tokens: what reaches the ranks, and what is refused with the reason."""

from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import EOS, Serving
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

SCHEMA = {"type": "object"}


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving]) -> Serving:
    return serve_once(FakeScheduler())


def ask(serving: Serving, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "prompt": "hello"} | body
    return httpx.post(f"{serving.url}/v1/completions", json=whole, timeout=PATIENCE)


def sampling(serving: Serving, **body: Any) -> SamplingParams:
    reply = ask(serving, **body)
    assert reply.status_code == 200, reply.text
    return serving.schedulers[0].submitted[-1].sampling


def test_a_bad_word_is_forbidden_at_the_start_of_a_text_and_behind_a_space(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    for given in ("fox", " fox"):
        found = sampling(serving, bad_words=[given]).bad_words
        assert {tokenizer.decode(word, False) for word in found} == {"fox", " fox"}
    assert len(sampling(serving, bad_words=["fox", " fox", "fox"]).bad_words) == 2


def test_bad_words_keep_one_order(serving: Serving) -> None:
    words = ["over", "the", "lazy"]
    found = sampling(serving, bad_words=words).bad_words
    assert found == sampling(serving, bad_words=words[::-1]).bad_words


def test_no_bad_words_and_no_list_of_tokens_forbid_nothing(serving: Serving) -> None:
    found = sampling(serving, bad_words=[], allowed_token_ids=None)
    assert (found.bad_words, found.allowed_tokens) == ((), b"")


def test_allowed_tokens_are_a_bit_each(serving: Serving) -> None:
    given = [9, 3, EOS, 9]
    bits = sampling(serving, allowed_token_ids=given).allowed_tokens
    flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
    assert np.flatnonzero(flags).tolist() == [EOS, 3, 9]
    everything = list(range(serving.router.config.vocab_size))
    assert len(sampling(serving, allowed_token_ids=everything).allowed_tokens) == 38


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_other_calls_for_text_have_both(serving: Serving, path: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "input": "a",
        "bad_words": ["fox"],
        "allowed_token_ids": [3],
    }
    body.pop("messages" if path == "/v1/responses" else "input")
    assert httpx.post(serving.url + path, json=body, timeout=PATIENCE).status_code == 200
    found = serving.schedulers[0].submitted[-1].sampling
    assert found.bad_words and found.allowed_tokens == b"\x08"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"bad_words": "fox"}, "bad_words", "valid array"),
        ({"bad_words": [1]}, "bad_words.0", "valid string"),
        ({"bad_words": [""]}, "bad_words", "has no tokens"),
        ({"bad_words": ["a"] * 257}, "bad_words", "at most 256 items"),
        ({"bad_words": ["a" * 2000] * 3}, "bad_words", "over 4096 characters together"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token -1 is out of vocabulary"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids", "is out of vocabulary"),
        ({"allowed_token_ids": [1] * 400}, "allowed_token_ids", "400 are more than the 3"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids.0", "valid integer"),
        (
            {"bad_words": ["a"], "allowed_token_ids": [0]},
            "bad_words",
            "they leave nothing of allowed_token_ids",
        ),
        (
            {"bad_words": ["a"], "guided_json": SCHEMA},
            "bad_words",
            "with guided_json, the form of the answer says which tokens may come",
        ),
        (
            {"allowed_token_ids": [5], "response_format": {"type": "json_object"}},
            "allowed_token_ids",
            "with response_format",
        ),
    ],
)
def test_what_cannot_be_kept_to_is_refused(
    serving: Serving, tokenizer: Tokenizer, body: dict[str, Any], param: str, reason: str
) -> None:
    if body.get("allowed_token_ids") == [0]:
        body = body | {"allowed_token_ids": list(tokenizer.encode("a", False))}
    reply = ask(serving, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
