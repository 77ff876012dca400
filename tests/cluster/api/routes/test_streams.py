"""Streams that are read on after their connection broke: nothing lost, nothing twice."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.real_engine import RealEngine
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

ASK = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 80,
    "seed": 5,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 1,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "resumable": True},
}


Event = tuple[str, dict[str, Any]]


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """Yield (id, message) of a stream; "" where an event has none."""
    last_id = ""
    for line in lines:
        if line.startswith("id: "):
            last_id = line.removeprefix("id: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield last_id, json.loads(line.removeprefix("data: "))
            last_id = ""


def whole(url: str, body: dict[str, Any], path: str = "/v1/completions") -> list[Event]:
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=PATIENCE) as reply:
        assert reply.status_code == 200, reply.read()
        return list(events_of(reply.iter_lines()))


def read(url: str, body: dict[str, Any], count: int, path: str) -> list[Event]:
    """Read some events and break the connection."""
    events: list[Event] = []
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=PATIENCE) as reply:
        for event in events_of(reply.iter_lines()):
            events.append(event)
            if len(events) == count:
                break
        assert reply.headers["x-stream-id"] == events[0][0].rpartition(":")[0]
    return events


def read_on(url: str, last_id: str, headers: dict[str, str] | None = None) -> httpx.Response:
    stream_id = last_id.rpartition(":")[0]
    told = {"Last-Event-ID": last_id, **(headers or {})}
    return httpx.get(f"{url}/v1/streams/{stream_id}", headers=told, timeout=PATIENCE)


def said(events: list[Event]) -> dict[int, dict[str, Any]]:
    """Return all that was said of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for _, message in events:
        for choice in message["choices"]:
            found = choices.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "offsets": [], "ends": []}
            )
            found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            found["logprobs"] += logprobs.get("token_logprobs") or logprobs.get("content") or []
            found["offsets"] += logprobs.get("text_offset") or []
            found["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return choices


def usage(events: list[Event]) -> list[int]:
    return [message["usage"]["total_tokens"] for _, message in events if message.get("usage")]


CHAT = {
    **{name: value for name, value in ASK.items() if name != "prompt"},
    "messages": [{"role": "user", "content": "hello"}],
    "logprobs": True,
    "top_logprobs": 1,
}


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK),
        ("/v1/completions", {**ASK, "n": 2, "temperature": 0.9}),
        ("/v1/completions", {**ASK, "stop": ["e"], "max_tokens": 60}),
        ("/v1/chat/completions", CHAT),
    ],
    ids=["one", "choices", "stop", "chat"],
)
def test_a_broken_stream_is_read_on_at_another_router(
    routers: tuple[Serving, Serving], path: str, body: dict[str, Any], count: int
) -> None:
    first, second = routers
    expected = whole(first.url, body, path)
    begun = read(first.url, body, min(count, len(expected) - 2), path)
    reply = read_on(second.url, begun[-1][0])
    assert reply.status_code == 200, reply.text
    rest = list(events_of(iter(reply.text.splitlines())))
    assert said([*begun, *rest]) == said(expected)
    assert usage(rest) == usage(expected)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert {message["id"] for _, message in [*begun, *rest]} == {begun[0][1]["id"]}


def test_a_stream_can_be_read_again_from_its_beginning_and_from_each_of_its_events(
    routers: tuple[Serving, Serving],
) -> None:
    first, second = routers
    events = whole(first.url, ASK)
    stream_id = events[0][0].rpartition(":")[0]
    for at, (event_id, _) in enumerate(events):
        if event_id:
            rest = list(events_of(iter(read_on(second.url, event_id).text.splitlines())))
            assert said([*events[: at + 1], *rest]) == said(events)
    reply = httpx.get(f"{first.url}/v1/streams/{stream_id}", timeout=PATIENCE)
    assert said(list(events_of(iter(reply.text.splitlines())))) == said(events)


@pytest.mark.parametrize("ids", ["{}:", "{}:x", "{}:9999", "{}:1.2", "other:1", "{}:-1"])
def test_an_id_that_is_of_no_event_is_refused_and_the_stream_stays(
    routers: tuple[Serving, Serving], ids: str
) -> None:
    url = routers[0].url
    begun = read(url, ASK, 3, "/v1/completions")
    stream_id = begun[0][0].rpartition(":")[0]
    wrong = {"Last-Event-ID": ids.format(stream_id)}
    reply = httpx.get(f"{url}/v1/streams/{stream_id}", headers=wrong, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    assert read_on(url, begun[-1][0]).status_code == 200


def test_streams_that_nobody_asked_to_keep_are_not_there(routers: tuple[Serving, Serving]) -> None:
    url = routers[0].url
    plain = {**ASK, "stream_options": {"include_usage": True}}
    assert {event_id for event_id, _ in whole(url, plain)} == {""}
    assert httpx.get(f"{url}/v1/streams/nothing", timeout=PATIENCE).status_code == 404


def test_a_stream_of_another_tenant_is_not_there_and_stays_with_its_reader(
    serve: Callable[..., Serving], engine: RealEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{key: first-secret, tenant: a}, {key: other-secret, tenant: b}]")
    url = serve(cast(FakeScheduler, engine), api_key_file=str(keys)).url
    own, other = ({"Authorization": f"Bearer {key}-secret"} for key in ("first", "other"))
    ask = {**ASK, "max_tokens": 200}
    events: list[Event] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=ask, headers=own, timeout=PATIENCE
    ) as reply:
        for event in events_of(reply.iter_lines()):
            events.append(event)
            if len(events) == 1:
                refused = read_on(url, event[0], other)
                assert (refused.status_code, refused.json()["error"]["param"]) == (404, "stream_id")
    assert said(events)[0]["ends"] == ["length"]
    assert read_on(url, events[0][0], own).status_code == 200


def test_a_call_with_several_prompts_cannot_be_kept(routers: tuple[Serving, Serving]) -> None:
    body = {**ASK, "prompt": ["a", "b"]}
    reply = httpx.post(f"{routers[0].url}/v1/completions", json=body, timeout=PATIENCE)
    assert reply.status_code == 400
    assert "single prompt" in reply.text


def test_an_echo_is_not_sent_twice_to_a_reader_that_comes_back(
    routers: tuple[Serving, Serving],
) -> None:
    first, second = (serving.url for serving in routers)
    plain = said(whole(first, ASK | {"logprobs": None}))[0]["text"]
    begun = read(first, ASK | {"logprobs": None, "echo": True}, 3, "/v1/completions")
    rest = list(events_of(read_on(second, begun[-1][0]).iter_lines()))
    assert said(begun)[0]["text"].startswith("hello")
    assert said(begun + rest)[0]["text"] == "hello" + plain
    again = begun[-1][0].rpartition(":")[0]
    anew = httpx.get(f"{second}/v1/streams/{again}", timeout=PATIENCE)
    assert said(list(events_of(anew.iter_lines())))[0]["text"] == "hello" + plain
