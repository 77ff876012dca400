"""Log-probabilities of prompts over a scripted scheduler, where token t has -t."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

PROMPT = "the quick "


@pytest.fixture
def serving(serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]) -> Serving:
    return serve(FakeScheduler(lambda _: Script(saying("fox"))))


def post(serving: Serving, path: str = "completions", **body: Any) -> dict[str, Any]:
    if path == "completions":
        body = {"prompt": PROMPT, **body}
    reply = httpx.post(f"{serving.url}/v1/{path}", json={"model": "tiny", **body}, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def refused(serving: Serving, path: str = "completions", **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, **body}
    reply = httpx.post(f"{serving.url}/v1/{path}", json=body, timeout=PATIENCE)
    assert reply.status_code == 400
    error: dict[str, Any] = reply.json()["error"]
    return error


def test_an_echo_with_logprobs_scores_all_tokens_but_the_first(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT, True)
    (choice,) = post(serving, echo=True, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == f"{PROMPT}fox"
    assert logprobs["token_logprobs"][: len(prompt)] == [None, *(-float(t) for t in prompt[1:])]
    assert logprobs["tokens"][: len(prompt)] == [tokenizer.token_text(t) for t in prompt]
    assert logprobs["top_logprobs"][0] is None
    for token_id, top in zip(prompt[1:], logprobs["top_logprobs"][1:], strict=False):
        assert top[tokenizer.token_text(token_id)] == -token_id
        assert len(top) == 2
    offsets = logprobs["text_offset"]
    shown = list(zip(offsets, logprobs["tokens"], strict=True))[:-1]  # but the end's own token
    assert all(choice["text"][offset:].startswith(text) for offset, text in shown)
    assert len(logprobs["token_logprobs"]) == len(offsets) > len(prompt)


def test_without_an_answer_there_is_the_prompt_alone(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT, True)
    whole = post(serving, echo=True, logprobs=0, max_tokens=0)
    (choice,) = whole["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(t) for t in prompt[1:])]
    assert whole["usage"]["completion_tokens"] == 0
    assert serving.router.num_in_flight == 0


def test_a_stream_begins_with_the_same(serving: Serving) -> None:
    (choice,) = post(serving, echo=True, logprobs=1)["choices"]
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "stream": True}
    reply = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=PATIENCE)
    lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")][:-1]
    parts = [json.loads(line)["choices"][0] for line in lines]
    for name, values in choice["logprobs"].items():
        assert [one for part in parts for one in part["logprobs"][name]] == values
    assert "".join(part["text"] for part in parts) == choice["text"]


def test_each_choice_of_each_prompt_has_those_of_its_prompt_computed_once(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    prompts = ["over ", "lazy dog"]
    choices = post(serving, prompt=prompts, n=2, echo=True, logprobs=0)["choices"]
    for choice, text in zip(choices, ["over ", "over ", "lazy dog", "lazy dog"], strict=True):
        prompt = tokenizer.encode(text, True)
        found = choice["logprobs"]["token_logprobs"][: len(prompt)]
        assert found == [None, *(-float(t) for t in prompt[1:])]
    asked = [request.sampling.prompt_logprobs for request in serving.schedulers[0].submitted]
    assert sorted(asked, key=str) == [0, 0, None, None]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_logprobs_come_in_the_shape_of_vllm(
    serving: Serving, tokenizer: Tokenizer, path: str
) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
    if path != "completions":
        body["messages"] = [{"role": "user", "content": "a"}]
    whole = post(serving, path, **body)
    holder = whole["choices"][0] if path == "completions" else whole
    prompt = holder["prompt_token_ids"]
    first, *rest = holder["prompt_logprobs"]
    assert first is None and len(rest) == len(prompt) - 1
    for token_id, at in zip(prompt[1:], rest, strict=True):
        text = tokenizer.token_text(token_id)
        assert at == {str(token_id): {"logprob": -token_id, "rank": 1, "decoded_token": text}}
    body["prompt_logprobs"] = 0
    whole = post(serving, path, **body)
    holder = whole["choices"][0] if path == "completions" else whole
    assert holder["prompt_logprobs"][1][str(prompt[1])]["rank"] == prompt[1] + 1


def test_what_cannot_be_told_is_refused(serving: Serving) -> None:
    assert "not in a stream" in refused(serving, prompt_logprobs=1, stream=True)["message"]
    assert refused(serving, prompt_logprobs=21)["param"] == "prompt_logprobs"
    options = {"resumable": True}
    error = refused(serving, echo=True, logprobs=1, stream=True, stream_options=options)
    assert error["param"] == "stream_options.resumable"


def test_a_prompt_with_too_many_entries_is_refused_with_the_numbers(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(FakeScheduler(), context_length=100_000)
    error = refused(serving, prompt=[5] * 13_000, prompt_logprobs=20)
    assert "13000 tokens with 20 alternatives each are 273000 entries" in error["message"]


def test_scores_outlive_the_loss_of_a_scheduler(
    serve: Callable[..., Serving], tokenizer: Tokenizer
) -> None:
    answer = (7, 8, 9, 10)
    fakes = (
        FakeScheduler(lambda _: Script(answer, dies_after=2)),
        FakeScheduler(lambda _: Script(answer)),
    )
    serving = serve(*fakes)
    prompt = tokenizer.encode(PROMPT, True)
    (choice,) = post(serving, echo=True, logprobs=0, max_tokens=4)["choices"]
    assert choice["logprobs"]["token_logprobs"][1 : len(prompt)] == [-float(t) for t in prompt[1:]]
