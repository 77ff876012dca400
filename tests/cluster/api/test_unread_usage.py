"""What is generated while nobody reads it counts once, for its tenant and for its limits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import yaml

from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.tenancy.usage import NO_USAGE, Usage
from tests.cluster.api.real_engine import RealEngine, Same
from tests.cluster.api.routes.test_streams import events_of
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

HEADERS = {"Authorization": "Bearer first key"}
PROMPT = [5, 6, 7, 8]
LIMIT = 100_000
LONG = 200  # tokens of an answer
ASK = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": LONG,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"resumable": True},
}
WHOLE = Usage(1, 4, 0, LONG)


@pytest.fixture
def keyed(
    serve: Callable[..., Serving], engine: RealEngine, tmp_path: Path
) -> tuple[Serving, Serving]:
    """Return two routers over one engine and one ledger, with a key that has a limit."""
    path = tmp_path / "keys.yaml"
    key = {"key": "first key", "tenant": "acme", "limits": {"tokens_per_minute": LIMIT}}
    path.write_text(yaml.safe_dump([key]))
    settings = {"api_key_file": str(path), "stream_keep": PATIENCE}
    first = serve(cast(FakeScheduler, engine), **settings)
    second = serve(cast(FakeScheduler, Same(engine)), **settings)
    second.backend.share(first.backend)
    return first, second


def used(*servings: Serving) -> Usage:
    total = NO_USAGE
    for serving in servings:
        total = total.plus(serving.router.metrics.counts("r").usage.get("acme", NO_USAGE))
    return total


def remaining(serving: Serving) -> int:
    """Return what the ledger has left, asked by a call that takes nothing."""
    for client in (serving.router.budgets,):
        serving.run(client.sync())
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 0}
    reply = httpx.post(
        f"{serving.url}/v1/completions", json={**body, "n": 999}, headers=HEADERS, timeout=PATIENCE
    )
    return int(reply.headers["x-ratelimit-remaining-tokens"])


def begin(serving: Serving, body: dict[str, Any] = ASK, path: str = "/v1/completions") -> str:
    """Read the beginning of a stream and go away; return the id of its last event."""
    url = f"{serving.url}{path}"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE) as reply:
        assert reply.status_code == 200, reply.read()
        return next(event_id for event_id, _ in events_of(reply.iter_lines()))


def read_on(serving: Serving, last_id: str) -> httpx.Response:
    stream_id = last_id.rpartition(":")[0]
    told = {"Last-Event-ID": last_id, **HEADERS}
    return httpx.get(f"{serving.url}/v1/streams/{stream_id}", headers=told, timeout=PATIENCE)


def is_settled(*servings: Serving) -> bool:
    return all(serving.router.num_in_flight == 0 for serving in servings)


def test_a_stream_whose_client_left_for_good_counts_to_its_end(
    keyed: tuple[Serving, Serving],
) -> None:
    first, second = keyed
    begin(first)
    wait_for(lambda: used(first, second) == WHOLE and is_settled(first, second))
    wait_for(lambda: remaining(first) == LIMIT - 4 - LONG)


def test_a_stream_that_is_read_on_at_another_router_counts_once(
    keyed: tuple[Serving, Serving],
) -> None:
    first, second = keyed
    last_id = begin(first)
    assert read_on(second, last_id).status_code == 200
    wait_for(lambda: is_settled(first, second))
    assert used(first, second) == WHOLE
    wait_for(lambda: remaining(first) == LIMIT - 4 - LONG)


def test_a_stream_that_is_read_on_again_and_again_counts_once(
    keyed: tuple[Serving, Serving],
) -> None:
    first, second = keyed
    last_id = begin(first, {**ASK, "n": 2, "temperature": 0.9})
    for serving in (first, second, first, second):
        stream_id = last_id.rpartition(":")[0]
        with httpx.stream(
            "GET", f"{serving.url}/v1/streams/{stream_id}", headers=HEADERS, timeout=PATIENCE
        ) as reply:
            next(reply.iter_lines())
    assert read_on(first, last_id).status_code == 200
    wait_for(lambda: is_settled(first, second))
    assert used(first, second) == Usage(2, 4, 0, 2 * LONG)
    # By the router that has taken of the limit: one that has not yet knows nothing of others.
    wait_for(lambda: remaining(first) == LIMIT - 4 - 2 * LONG)


def test_a_claim_that_is_refused_changes_no_count(keyed: tuple[Serving, Serving]) -> None:
    first, second = keyed
    last_id = begin(first)
    wrong = f"{last_id.rpartition(':')[0]}:99999"
    assert read_on(second, wrong).status_code == 400
    assert read_on(second, last_id).status_code == 200
    wait_for(lambda: is_settled(first, second))
    wait_for(lambda: used(first, second) == WHOLE)
    # What it had after the refusal is owed only if it was read on before its end.
    owed = {4 + used(first).generation_tokens, 4 + LONG}
    wait_for(lambda: LIMIT - remaining(first) in owed)


def test_a_response_in_the_background_counts_where_nobody_reads_it(
    keyed: tuple[Serving, Serving],
) -> None:
    first, second = keyed
    body = {"model": "tiny", "input": "a", "background": True, "max_output_tokens": 60}
    reply = httpx.post(f"{first.url}/v1/responses", json=body, headers=HEADERS, timeout=PATIENCE)
    url = f"{second.url}/v1/responses/{reply.json()['id']}"

    def answer() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(httpx.get(url, headers=HEADERS, timeout=PATIENCE).text)
        return found

    wait_for(lambda: answer()["status"] not in ("queued", "in_progress"))
    told = answer()["usage"]
    wait_for(lambda: is_settled(first, second))
    assert used(first, second) == Usage(1, told["input_tokens"], 0, told["output_tokens"])
    wait_for(lambda: remaining(first) == LIMIT - told["total_tokens"])


def test_a_stored_response_that_ends_with_its_client_counts_as_far_as_it_came(
    keyed: tuple[Serving, Serving],
) -> None:
    first, second = keyed
    body = {"model": "tiny", "input": "a", "stream": True, "max_output_tokens": 200}
    url = f"{first.url}/v1/responses"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE) as reply:
        next(reply.iter_lines())
    wait_for(lambda: is_settled(first, second) and used(first, second).requests == 1)
    counted = used(first, second)
    left = LIMIT - counted.computed_prompt_tokens - counted.generation_tokens
    wait_for(lambda: remaining(first) == left)
