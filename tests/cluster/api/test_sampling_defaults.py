"""How a request is sampled that does not say it, by the server's defaults."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.request import Request
from cluster.router.config import SamplingDefaults
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

DEFAULTS = SamplingDefaults(
    temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.25, max_tokens=7
)


@pytest.fixture
def asked(serve: Callable[..., Serving]) -> Callable[..., tuple[Request, Any]]:
    """Return a function that posts a body and returns what was submitted and answered."""
    serving = serve(FakeScheduler(), sampling_defaults=DEFAULTS)

    def ask(path: str, **body: Any) -> tuple[Request, Any]:
        reply = httpx.post(serving.url + path, json={"model": "tiny"} | body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return serving.schedulers[0].submitted[-1], reply.json()

    return ask


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_what_a_request_does_not_say_is_the_servers_to_say(
    asked: Callable[..., tuple[Request, Any]], path: str, body: dict[str, Any]
) -> None:
    request, reply = asked(path, **body, temperature=None)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.25)
    assert request.max_tokens == (16 if path == "/v1/completions" else 7)
    if path == "/v1/responses":
        assert (reply["temperature"], reply["top_p"]) == (0.5, 0.75)


def test_what_a_request_says_goes_before_the_defaults(
    asked: Callable[..., tuple[Request, Any]],
) -> None:
    said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    messages = [{"role": "user", "content": "a"}]
    request, _ = asked("/v1/chat/completions", messages=messages, max_tokens=9, **said)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty, request.max_tokens) == (0.0, 1.0, 9)
