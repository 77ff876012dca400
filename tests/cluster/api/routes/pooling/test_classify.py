"""POST /v1/classify over a scripted scheduler: heads, inputs, labels, refusals.

What the scheduler makes of a prompt is its length, its first token and its last.
"""

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE
from worker.classifier_config import ClassifierConfig

Serve = Callable[..., Serving]
HEAD = ClassifierConfig(("low", "mid", "high"), "softmax")


def post(serving: Serving, path: str = "/v1/classify", **body: Any) -> httpx.Response:
    body = {"model": "tiny", **body}
    return httpx.post(f"{serving.url}{path}", json=body, timeout=PATIENCE)


def data(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["data"]
    assert [one["index"] for one in found] == list(range(len(found)))
    return found


def load(serving: Serving, name: str) -> None:
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"}
    reply = httpx.post(f"{serving.url}/v1/load_lora_adapter", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text


def message(reply: httpx.Response, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    text: str = reply.json()["error"]["message"]
    return text


def test_a_models_head_gives_each_prompt_a_label_and_the_chances_of_all(serve: Serve) -> None:
    fake = FakeScheduler()
    serving = serve(fake, classifier=HEAD)
    first, second = data(post(serving, input=[[5, 6, 4], [8]]))
    total = sum(math.exp(number) for number in (3, 5, 4))
    wanted = [math.exp(number) / total for number in (3, 5, 4)]
    assert first["probs"] == pytest.approx(wanted) and first["label"] == "mid"
    assert first["num_classes"] == 3 and second["label"] == "mid"  # the first of equals
    assert [request.sampling.pooling for request in fake.submitted] == ["classify"] * 2
    reply = post(serving, input=[5, 6, 4], use_activation=False).json()
    assert reply["data"][0]["probs"] == [3.0, 5.0, 4.0]
    assert reply["object"] == "list" and reply["model"] == "tiny"
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (3, 3)


@pytest.mark.parametrize(
    ("activation", "of_zero", "of_huge"),
    [("softmax", 0.0, 0.5), ("sigmoid", 0.5, 1.0), ("identity", 0.0, 200.0)],
)
def test_the_activation_is_that_of_the_problem(
    serve: Serve, activation: str, of_zero: float, of_huge: float
) -> None:
    serving = serve(FakeScheduler(), classifier=ClassifierConfig(("a", "b", "c"), activation))  # type: ignore[arg-type]
    (found,) = data(post(serving, input=[0, *[7] * 198, 200]))
    assert found["probs"] == pytest.approx([of_huge, of_zero, of_huge])


def test_an_adapters_head_goes_before_the_models(serve: Serve) -> None:
    serving = serve(FakeScheduler(), classifier=HEAD)
    load(serving, "classifier")
    load(serving, "pirate")
    assert data(post(serving, model="classifier", input=[5]))[0]["label"] == "fair"
    assert data(post(serving, model="pirate", input=[5]))[0]["label"] == "mid"
    alone = post(serving, input=[5], lora=[{"name": "classifier"}])
    assert data(alone)[0]["label"] == "fair"
    reply = post(serving, input=[5], lora=[{"name": "classifier"}, {"name": "pirate"}])
    assert "brings a classification head" in message(reply)


def test_a_model_without_a_head_is_refused_and_so_is_an_adapter(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    load(serving, "pirate")
    for name in ("tiny", "pirate"):
        assert "has no classification head" in message(post(serving, model=name, input="a"))


def test_what_has_a_head_does_not_generate(serve: Serve) -> None:
    serving = serve(FakeScheduler())
    load(serving, "classifier")
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    calls = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "a"},
        "/v1/messages": chat,
        "/v1/responses": {"input": "a"},
        "/v1/completions/render": {"prompt": "a"},
    }
    for path, body in calls.items():
        reply = post(serving, path, model="classifier", **body)
        assert "trained with a classification head, not to generate" in message(reply), path
        assert post(serving, path, **body).status_code == 200, path
    headless = serve(FakeScheduler(), classifier=HEAD)
    for path, body in calls.items():
        assert "no lm_head, so it generates nothing" in message(post(headless, path, **body)), path


def test_texts_are_tokenized_and_conversations_rendered(serve: Serve, tokenizer: Tokenizer) -> None:
    fake = FakeScheduler()
    serving = serve(fake, classifier=HEAD)
    data(post(serving, "/classify", input=["hello", "a"]))
    data(post(serving, messages=[{"role": "user", "content": "hello"}]))
    assert [request.token_ids for request in fake.submitted[:2]] == [
        tokenizer.encode("hello", True),
        tokenizer.encode("a", True),
    ]
    rendered = tokenizer.render([{"role": "user", "content": "hello"}], False, False, {})
    assert fake.submitted[2].token_ids == tokenizer.encode(rendered, False)


def test_a_prompt_is_read_up_to_its_last_token_that_is_no_padding(serve: Serve) -> None:
    fake = FakeScheduler()
    serving = serve(fake, classifier=HEAD, pad_token_id=9)
    reply = post(serving, input=[[9, 5, 9, 6, 9, 9], [9, 9], [9, 5]])
    assert [one.token_ids for one in fake.submitted] == [(9, 5, 9, 6), (9,), (9, 5)]
    assert reply.json()["usage"]["prompt_tokens"] == 10


def test_prompts_are_cut_on_the_side_that_is_asked_for(serve: Serve) -> None:
    fake = FakeScheduler()
    serving = serve(fake, classifier=HEAD)
    for side in ("left", "right"):
        data(post(serving, input=[5, 6, 7], truncate_prompt_tokens=2, truncation_side=side))
    assert [one.token_ids for one in fake.submitted] == [(6, 7), (5, 6)]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "input", "either it or messages"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", "either it or"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": [400]}, "input", "vocabulary"),
        ({"input": [1] * 257}, "prompt", "context length is 256"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "input", "leaves nothing"),
        ({"input": "a", "dimensions": 3}, "dimensions", "not a known parameter"),
        ({"input": "a", "padding": "max_length"}, "padding", "is not supported"),
    ],
)
def test_mistakes_are_refused_with_the_parameter(
    serve: Serve, body: dict[str, Any], param: str, reason: str
) -> None:
    reply = post(serve(FakeScheduler(), classifier=HEAD), **body)
    assert reason in message(reply) and reply.json()["error"]["param"] == param
