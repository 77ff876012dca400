"""Answers that begin with what they go on with, and prompts that are cut."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE


@pytest.fixture
def serving(serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]) -> Serving:
    return serve(FakeScheduler(lambda _: Script(saying("fox jumps"))))


def post(serving: Serving, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "prompt": "the quick "} | body
    return httpx.post(f"{serving.url}/v1/completions", json=whole, timeout=PATIENCE)


def texts(serving: Serving, **body: Any) -> list[str]:
    reply = post(serving, **body)
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def streamed(serving: Serving, **body: Any) -> tuple[dict[int, str], list[Any]]:
    """Return the text of each choice of a stream, and its events."""
    reply = post(serving, stream=True, **body)
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined, events


def test_an_echo_comes_before_the_answer(serving: Serving) -> None:
    assert texts(serving, echo=True) == ["the quick fox jumps"]
    assert texts(serving, echo=False) == ["fox jumps"]
    assert streamed(serving, echo=True)[0] == {0: "the quick fox jumps"}


def test_each_choice_has_the_echo_of_its_own_prompt(serving: Serving) -> None:
    body = {"prompt": ["over ", "lazy "], "n": 2, "echo": True}
    expected = ["over fox jumps"] * 2 + ["lazy fox jumps"] * 2
    assert texts(serving, **body) == expected
    assert streamed(serving, **body)[0] == dict(enumerate(expected))


def test_the_best_of_several_has_one_echo(serving: Serving) -> None:
    body = {"prompt": ["over ", "lazy "], "n": 1, "best_of": 2, "echo": True}
    assert texts(serving, **body) == ["over fox jumps", "lazy fox jumps"]


def test_token_ids_are_echoed_as_their_text(serving: Serving, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("hello ", False))
    assert texts(serving, prompt=ids, echo=True) == ["hello fox jumps"]


def test_usage_and_token_ids_are_of_the_answer(serving: Serving) -> None:
    plain = post(serving, return_token_ids=True).json()
    echoed = post(serving, return_token_ids=True, echo=True).json()
    assert echoed["usage"] == plain["usage"]
    assert echoed["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


def test_no_tokens_and_an_echo_are_the_prompt_alone(serving: Serving) -> None:
    body = {"prompt": ["over ", "lazy "], "echo": True, "max_tokens": 0, "n": 2}
    reply = post(serving, **body).json()
    assert [choice["text"] for choice in reply["choices"]] == ["over ", "over ", "lazy ", "lazy "]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    usage = reply["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == usage["total_tokens"] > 0
    joined, events = streamed(serving, **body, stream_options={"include_usage": True})
    assert joined == dict(enumerate(["over ", "over ", "lazy ", "lazy "]))
    assert events[-1]["usage"] == usage
    assert not serving.schedulers[0].submitted


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens", "only allowed with echo"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", "only allowed with echo"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "greater than or equal to 0"),
        ({"echo": "yes"}, "echo", "valid boolean"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ],
)
def test_what_an_echo_or_a_cut_cannot_be_is_refused(
    serving: Serving, body: dict[str, Any], param: str, reason: str
) -> None:
    reply = post(serving, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert reason in reply.json()["error"]["message"]


def test_a_prompt_keeps_its_last_tokens(serving: Serving) -> None:
    ids = list(range(50, 90))
    for wanted, left in ((3, ids[-3:]), (40, ids), (1000, ids)):
        post(serving, prompt=ids, truncate_prompt_tokens=wanted)
        assert list(serving.schedulers[0].submitted[-1].token_ids) == left
    post(serving, prompt=ids, truncate_prompt_tokens=3, truncation_side="right")
    assert list(serving.schedulers[0].submitted[-1].token_ids) == ids[:3]


def test_a_prompt_is_cut_to_what_fits_with_its_answer(serving: Serving) -> None:
    ids = [50 + number % 100 for number in range(400)]
    assert post(serving, prompt=ids).status_code == 400
    for extra, length in (({}, 240), ({"max_tokens": 56}, 200)):
        reply = post(serving, prompt=ids, truncate_prompt_tokens=-1, **extra)
        assert reply.status_code == 200, reply.text
        assert list(serving.schedulers[0].submitted[-1].token_ids) == ids[-length:]
    reply = post(serving, prompt=ids, truncate_prompt_tokens=-1, max_tokens=256)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_is_cut_too(serving: Serving) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 400}]}
    url = f"{serving.url}/v1/chat/completions"
    assert httpx.post(url, json=body, timeout=PATIENCE).status_code == 400
    cut = body | {"truncate_prompt_tokens": -1}
    assert httpx.post(url, json=cut, timeout=PATIENCE).status_code == 200
    (request,) = serving.schedulers[0].submitted
    assert (len(request.token_ids), request.max_tokens) == (255, 1)


def test_what_is_echoed_of_a_cut_prompt_is_what_is_left(serving: Serving) -> None:
    echoed = texts(serving, echo=True, truncate_prompt_tokens=2)[0]
    assert echoed.endswith("fox jumps") and len(echoed) < len("the quick fox jumps")


def chat(serving: Serving, *turns: tuple[str, Any], **body: Any) -> httpx.Response:
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = {"model": "tiny", "messages": messages, "echo": True} | body
    return httpx.post(f"{serving.url}/v1/chat/completions", json=whole, timeout=PATIENCE)


BEGUN = [
    ("the quick ", "the quick "),
    ([{"type": "text", "text": "the"}, {"type": "text", "text": "quick "}], "the\nquick "),
]


@pytest.mark.parametrize(("content", "text"), BEGUN)
def test_a_chat_that_goes_on_with_a_turn_echoes_it(
    serving: Serving, content: Any, text: str
) -> None:
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, "n": 2}
    reply = chat(serving, ("user", "a"), ("assistant", content), **goes_on)
    said = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert said == [f"{text}fox jumps"] * 2
    reply = chat(serving, ("user", "a"), ("assistant", content), stream=True, **goes_on)
    joined = {0: "", 1: ""}
    for line in reply.text.split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                joined[choice["index"]] += choice["delta"].get("content", "")
    assert joined == dict.fromkeys((0, 1), f"{text}fox jumps")


def test_a_turn_of_the_user_is_not_echoed(serving: Serving) -> None:
    reply = chat(serving, ("assistant", "b"), ("user", "a"))
    assert reply.json()["choices"][0]["message"]["content"] == "fox jumps"
