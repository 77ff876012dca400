"""Log-probabilities of tokens that a call names: what ranks are asked for, and what is refused."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
CALLS = [
    ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
    ("completions", {"prompt": "a", "logprobs": 5}),
]


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving]) -> Serving:
    return serve_once(FakeScheduler())


def post(serving: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 1} | body
    return httpx.post(f"{serving.url}/v1/{path}", json=body, timeout=PATIENCE)


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_the_tokens_that_are_named_are_asked_for_once_and_the_likeliest_are_not(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    assert post(serving, path, body | {"logprob_token_ids": [9, 4, 9]}).status_code == 200
    sampling = serving.schedulers[0].submitted[-1].sampling
    assert (sampling.num_logprobs, sampling.logprob_token_ids) == (0, (9, 4))
    assert post(serving, path, body | {"logprob_token_ids": []}).status_code == 200
    sampling = serving.schedulers[0].submitted[-1].sampling
    assert (sampling.num_logprobs, sampling.logprob_token_ids) == (5, ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": None, "top_logprobs": None}, "needs logprobs"),
        ({"logprobs": None, "top_logprobs": None, "best_of": 2}, "needs logprobs"),
        ({"logprob_token_ids": [10**6]}, "out of vocabulary"),
        ({"logprob_token_ids": [-1]}, "out of vocabulary"),
        ({"logprob_token_ids": [*range(129)]}, "at most 128"),
        ({"logprob_token_ids": ["4"]}, "valid integer"),
    ],
)
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_what_cannot_be_named_is_refused(
    serving: Serving, path: str, body: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    if "best_of" in change and path != "completions":
        change = {name: value for name, value in change.items() if name != "best_of"}
    reply = post(serving, path, body | {"logprob_token_ids": [4]} | change)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].startswith("logprob_token_ids") and reason in error["message"]
