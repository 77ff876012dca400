"""Limits of keys and tenants as callers meet them, on every route that a model answers."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.api.middleware.rate_limits import duration
from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.tenancy.usage import Usage
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for as until
from tests.patience import PATIENCE

Start = Callable[..., Serving]
PROMPT = [5, 6, 7, 8]  # four tokens
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/invocations": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/classify": {"input": PROMPT},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


def post(
    serving: Serving, body: dict[str, Any], key: str = "first key", path: str = "/v1/completions"
) -> httpx.Response:
    return httpx.post(
        f"{serving.url}{path}",
        json={"model": "tiny", **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )


def complete(
    serving: Serving, max_tokens: int | None = 2, key: str = "first key", **more: Any
) -> httpx.Response:
    body = {"prompt": PROMPT, "ignore_eos": True, **more}
    return post(serving, body if max_tokens is None else {**body, "max_tokens": max_tokens}, key)


@pytest.fixture
def limited(serve: Start, model_dir: Path, tmp_path: Path) -> Callable[..., Serving]:
    """Return a function that serves two keys of one tenant and one of another."""

    def start(
        *schedulers: FakeScheduler,
        key: dict[str, int] | None = None,
        tenant: dict[str, int] | None = None,
        **changes: Any,
    ) -> Serving:
        path = tmp_path / "keys.yaml"
        first = {"key": "first key", "tenant": "acme", "adapters": "*"}
        entries = [
            {**first, "limits": key or {}, "tenant_limits": tenant or {}},
            {**first, "key": "second key"},
            {**first, "key": "other key", "tenant": "other"},
        ]
        path.write_text(yaml.safe_dump(entries))
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        (directory / "config.json").write_text('{"hidden_size": 3}')
        fakes = schedulers or (FakeScheduler(),)
        return serve(*fakes, api_key_file=str(path), model_dir=str(directory), **changes)

    return start


@pytest.mark.parametrize("path", CALLS)
def test_every_route_that_a_model_answers_counts_its_requests(
    limited: Callable[..., Serving], path: str
) -> None:
    serving = limited(key={"requests_per_minute": 1})
    first = post(serving, CALLS[path], path=path)
    assert first.status_code in (200, 400), first.text  # 400: this model does no such thing
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert first.headers["x-ratelimit-reset-requests"].startswith("1m")

    second = post(serving, CALLS[path], path=path)
    assert second.status_code == 429
    assert 55 <= int(second.headers["retry-after"]) <= 61
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert "requests per minute: limit 1" in second.text
    assert post(serving, CALLS[path], "other key", path).status_code == first.status_code


def test_a_limit_of_a_tenant_is_of_all_its_keys_together(limited: Callable[..., Serving]) -> None:
    serving = limited(tenant={"requests_per_minute": 2})
    assert complete(serving).status_code == 200
    assert complete(serving, key="second key").status_code == 200
    refused = complete(serving, key="second key")
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "the tenant 'acme'" in error["message"]
    assert complete(serving, key="other key").status_code == 200


def test_an_answer_takes_its_max_tokens_and_gives_back_what_it_has_not_used(
    limited: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = limited(FakeScheduler(lambda _: Script(saying("ab"))), key={"tokens_per_minute": 100})
    num_answered = len(saying("ab"))
    for number in range(3):
        reply = complete(serving, 80, ignore_eos=False)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == num_answered
        left = 100 - (number + 1) * (4 + num_answered)
        until(lambda left=left: remaining(serving) == left)
    refused = complete(serving, 90)
    assert refused.status_code == 429
    assert "requested 94" in refused.text


def remaining(serving: Serving) -> int:
    """Return what a call that takes nothing is told."""
    reply = complete(serving, 2000)  # refused before it takes anything
    return int(reply.headers["x-ratelimit-remaining-tokens"])


def test_all_choices_count_and_their_prompt_once(limited: Callable[..., Serving]) -> None:
    serving = limited(key={"tokens_per_minute": 100})
    assert complete(serving, 5, n=3).status_code == 200
    until(lambda: remaining(serving) == 100 - 4 - 15)


def test_more_tokens_than_a_limit_are_refused_without_a_time(
    limited: Callable[..., Serving],
) -> None:
    serving = limited(key={"tokens_per_minute": 50})
    refused = complete(serving, 60)
    assert refused.status_code == 429
    assert "retry-after" not in refused.headers
    assert "can never be served" in refused.text


def test_what_an_answer_without_max_tokens_has_beyond_what_it_took_is_owed(
    limited: Callable[..., Serving],
) -> None:
    serving = limited(key={"tokens_per_minute": 600}, context_length=1000)
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    reply = post(serving, chat, path="/v1/chat/completions")  # as long as the context lets it be
    assert reply.json()["usage"]["total_tokens"] == 1000
    refused = complete(serving, 20)
    assert refused.status_code == 429
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) <= 6  # leased ahead


def test_a_call_that_fails_gives_back_what_it_took(limited: Callable[..., Serving]) -> None:
    down = ErrorInfo("Internal", "broken")
    serving = limited(
        FakeScheduler(lambda _: Script((), error=down)),
        key={"requests_per_minute": 2, "tokens_per_minute": 10},
    )
    for _ in range(4):
        assert complete(serving, 6).status_code == 500


def test_a_call_that_is_wrong_counts_as_a_request_and_takes_no_tokens(
    limited: Callable[..., Serving],
) -> None:
    serving = limited(key={"requests_per_minute": 2, "tokens_per_minute": 10})
    assert complete(serving, 6, temperature=-1).status_code == 400
    assert complete(serving, 6).status_code == 200
    assert complete(serving, 0).status_code == 429


def test_answers_at_a_time_are_limited_and_a_place_is_free_at_the_end(
    limited: Callable[..., Serving],
) -> None:
    scheduler = FakeScheduler(lambda _: Script(pauses_after=1))
    serving = limited(scheduler, tenant={"max_concurrency": 1})
    waiting = threading.Thread(target=complete, args=(serving, 3))
    waiting.start()
    until(lambda: serving.router.num_in_flight == 1)
    refused = complete(serving, key="second key")
    assert refused.status_code == 429
    assert "answers at a time: limit 1" in refused.text
    assert int(refused.headers["retry-after"]) >= 1
    scheduler.resume()
    waiting.join(PATIENCE)
    assert complete(serving, n=2).status_code == 400  # never
    serving.schedulers[0]._script = lambda _: Script()
    assert complete(serving).status_code == 200


def test_an_answer_that_has_a_token_does_not_wait_any_more(
    limited: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]
) -> None:
    scheduler = FakeScheduler(lambda _: Script(is_silent=True))
    serving = limited(scheduler, key={"max_waiting": 1})
    with httpx.Client(timeout=PATIENCE) as client:
        ask = client.build_request(
            "POST",
            f"{serving.url}/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True},
            headers={"Authorization": "Bearer first key"},
        )
        scheduler._script = lambda _: Script(saying("abc"), pauses_after=1)
        reply = client.send(ask, stream=True)
        lines = reply.iter_lines()  # which ends the call with it
        next(lines)  # its first token
        scheduler._script = lambda _: Script(pauses_after=0)
        second = threading.Thread(target=complete, args=(serving, 3))
        second.start()
        until(lambda: serving.router.num_in_flight == 2)
        refused = complete(serving)
        assert refused.status_code == 429
        assert "answers that wait: limit 1" in refused.text
        reply.close()
    scheduler.resume()
    second.join(PATIENCE)


def test_prompts_and_answers_have_a_greatest_length(limited: Callable[..., Serving]) -> None:
    serving = limited(
        key={"max_prompt_tokens": 4}, tenant={"max_prompt_tokens": 9, "max_output_tokens": 3}
    )
    assert complete(serving, 3).status_code == 200
    too_long = complete(serving, 3, prompt=[*PROMPT, 9])
    assert too_long.status_code == 400
    assert "has 5 tokens, and this key may send 4" in too_long.text
    assert complete(serving, 4).status_code == 400
    # Who does not say how long gets as much as there may be.
    assert complete(serving, None).json()["usage"]["completion_tokens"] == 3
    assert complete(serving, 3, key="second key", prompt=[*PROMPT, 9]).status_code == 200


def test_embeddings_take_places_as_they_are_free_and_their_tokens_once(
    limited: Callable[..., Serving],
) -> None:
    serving = limited(key={"max_concurrency": 2, "tokens_per_minute": 100})
    reply = post(serving, {"input": [PROMPT] * 10}, path="/v1/embeddings")
    assert reply.status_code == 200, reply.text
    until(lambda: remaining(serving) == 60)


def test_one_tenant_that_fills_a_router_leaves_room_for_others(
    limited: Callable[..., Serving],
) -> None:
    scheduler = FakeScheduler(lambda _: Script(pauses_after=1))
    serving = limited(scheduler, max_in_flight=4)
    threads = [threading.Thread(target=complete, args=(serving, 3)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: serving.router.num_in_flight == 3)
    serving.router._mean_seconds = 40.0  # that calls took lately
    refused = complete(serving, key="second key")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "14")
    assert "3 answers of this tenant" in refused.text
    serving.schedulers[0]._script = lambda _: Script()
    assert complete(serving, key="other key").status_code == 200
    scheduler.resume()
    for thread in threads:
        thread.join(PATIENCE)


def test_calls_without_limits_have_no_headers_of_them(limited: Callable[..., Serving]) -> None:
    serving = limited(key={"requests_per_minute": 5})
    headers = complete(serving, key="other key").headers
    assert not [name for name in headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("seconds", "spelled"),
    [(0.0, "0ms"), (0.25, "250ms"), (6.5, "6.5s"), (60.0, "1m0s"), (60.5, "1m0.5s")],
)
def test_times_are_spelled_as_openai_spells_them(seconds: float, spelled: str) -> None:
    assert duration(seconds) == spelled


def test_a_limit_holds_over_two_routers_and_while_their_pool_is_away(
    limited: Callable[..., Serving], serve: Start
) -> None:
    one = limited(key={"requests_per_minute": 4})
    config = one.router.config
    other = serve(FakeScheduler(), api_key_file=config.api_key_file, model_dir=config.model_dir)
    other.backend.share(one.backend)
    assert [complete(serving).status_code for serving in (one, other)] == [200, 200]
    for serving in (one, other):
        serving.run(serving.router.budgets.sync())
    one.backend.is_down = other.backend.is_down = True
    for serving in (one, other):  # each has its part of what was left
        assert [complete(serving).status_code for _ in range(2)] == [200, 429]
    one.backend.is_down = other.backend.is_down = False
    for serving in (one, other):
        serving.run(serving.router.budgets.sync())
    assert [complete(serving).status_code for serving in (one, other)] == [429, 429]


def test_an_answer_that_goes_on_after_a_loss_is_not_counted_again(
    limited: Callable[..., Serving],
) -> None:
    lost: list[str] = []

    def script(request: Request) -> Script:
        lost.append(request.request_id)
        return Script(dies_after=1) if len(lost) == 1 else Script()

    serving = limited(
        FakeScheduler(script),
        FakeScheduler(script, replica="1"),
        key={"requests_per_minute": 1, "tokens_per_minute": 100, "max_concurrency": 1},
    )
    assert complete(serving, 5).status_code == 200
    assert len(lost) == 2
    assert complete(serving, 5).headers["x-ratelimit-remaining-tokens"] == "91"
    assert serving.router.metrics.counts("r").usage["acme"] == Usage(1, 4, 0, 5)
