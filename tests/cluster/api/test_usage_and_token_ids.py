"""Usage with every event of a stream, and tokens that log-probabilities name by their ids."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

CALLS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    ("/v1/completions", {"prompt": "hello", "logprobs": 1}),
]

PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")


@pytest.fixture
def serving(serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]) -> Serving:
    return serve(FakeScheduler(lambda _: Script(saying("fox jumps"))))


def post(serving: Serving, path: str, **body: Any) -> httpx.Response:
    reply = httpx.post(serving.url + path, json={"model": "tiny"} | body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    return reply


def events(serving: Serving, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    reply = post(serving, path, **body, stream=True, stream_options=options)
    lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("has_logprobs", [True, False])
def test_each_event_carries_the_usage_so_far(
    serving: Serving, path: str, body: dict[str, Any], has_logprobs: bool
) -> None:
    if not has_logprobs:
        body = {name: value for name, value in body.items() if name != "logprobs"}
    found = events(serving, path, body | {"n": 2}, include_usage=True, continuous_usage_stats=True)
    *growing, last = found
    assert last["choices"] == []
    for index in (0, 1):
        of_choice = [e["usage"] for e in growing if e["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in of_choice]
        assert counts == sorted(set(counts)) and len(counts) > 1
        assert counts[-1] * 2 == last["usage"]["completion_tokens"]
        for usage in of_choice:
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            total = usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["total_tokens"] == total


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_continuous_usage_says_nothing_without_usage(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    found = events(serving, path, body, continuous_usage_stats=True)
    assert all("usage" not in event for event in found)


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("is_told", [True, False])
def test_usage_tells_what_was_cached_unless_the_server_is_told_not_to(
    serve: Callable[..., Serving], path: str, body: dict[str, Any], is_told: bool
) -> None:
    fake = FakeScheduler(lambda _: Script((7, 8), num_cached_tokens=1))
    serving = serve(fake, enable_prompt_tokens_details=is_told)
    told = [post(serving, path, **body).json()["usage"]]
    options = {"include_usage": True, "continuous_usage_stats": True}
    told += [event["usage"] for event in events(serving, path, body, **options)]
    assert len(told) == 4
    for usage in told:
        assert usage.get("prompt_tokens_details") == ({"cached_tokens": 1} if is_told else None)


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("is_stream", [True, False])
def test_log_probabilities_may_name_tokens_by_their_ids(
    serving: Serving, path: str, body: dict[str, Any], is_stream: bool
) -> None:
    body = body | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answers = events(serving, path, body) if is_stream else [post(serving, path, **body).json()]
    names: list[str] = []
    token_ids: list[int] = []
    for answer in answers:
        for choice in answer["choices"]:
            token_ids += choice["token_ids"]
            shown = choice["logprobs"]
            names += shown.get("tokens") or [one["token"] for one in shown["content"]]
            for top in shown.get("top_logprobs") or []:
                assert all(name.startswith("token_id:") for name in top)
    assert names == [f"token_id:{token_id}" for token_id in token_ids]


def test_without_it_tokens_are_named_by_their_texts(serving: Serving) -> None:
    reply = post(serving, "/v1/completions", **CALLS[1][1], return_tokens_as_token_ids=False)
    assert "".join(reply.json()["choices"][0]["logprobs"]["tokens"]).startswith("fox jumps")


def test_a_chat_goes_on_from_the_tokens_that_another_stage_has_made(serving: Serving) -> None:
    body = CALLS[0][1] | {"return_token_ids": True}
    given = {"kv_transfer_params": {"prompt_token_ids": [7, 8, 9]}}
    assert post(serving, CALLS[0][0], **body, **given).json()["prompt_token_ids"] == [7, 8, 9]
    assert list(serving.schedulers[0].submitted[-1].token_ids) == [7, 8, 9]
    url = serving.url + CALLS[0][0]
    for wrong, param in (
        ({"prompt_token_ids": [10**6]}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": []}, "kv_transfer_params.prompt_token_ids"),
        ({"remote_engine_id": "x"}, "kv_transfer_params.remote_engine_id"),
    ):
        sent = {"model": "tiny"} | body | {"kv_transfer_params": wrong}
        reply = httpx.post(url, json=sent, timeout=PATIENCE)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_what_was_not_asked_for_is_null_in_a_whole_answer_and_missing_from_a_stream(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    of_choice = {"token_ids"} if "chat" in path else {"token_ids", *PROMPT_FIELDS}
    of_answer = set(PROMPT_FIELDS) if "chat" in path else set()
    whole = post(serving, path, **body).json()
    assert {name: whole[name] for name in of_answer} == dict.fromkeys(of_answer)
    assert {name: whole["choices"][0][name] for name in of_choice} == dict.fromkeys(of_choice)
    for event in events(serving, path, body):
        assert not of_answer & set(event)
        assert not of_choice & set(event["choices"][0])
