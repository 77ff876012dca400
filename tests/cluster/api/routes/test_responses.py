"""The Responses API over a real engine and two routers, by the real openai client and by HTTP."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.real_engine import RealEngine, Same
from tests.cluster.conftest import Serving
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

Routers = tuple[Serving, Serving]
BEFORE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
AFTER = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json={"model": "tiny", **body}, timeout=PATIENCE)


def get(url: str, response_id: str, **query: Any) -> httpx.Response:
    return httpx.get(f"{url}/v1/responses/{response_id}", params=query, timeout=PATIENCE)


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream; each is one that the openai package knows."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            message = json.loads(line.removeprefix("data: "))
            assert message["type"] == name
            EVENTS.validate_python(message, strict=False)
            yield message


def streamed(url: str, **body: Any) -> list[dict[str, Any]]:
    reply = post(url, stream=True, **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return list(events_of(iter(reply.text.splitlines())))


def rest(url: str, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = {} if after is None else {"starting_after": after}
    reply = get(url, response_id, stream="true", **query)
    assert reply.status_code == 200, reply.text
    return list(events_of(iter(reply.text.splitlines())))


def ended(url: str, response_id: str) -> dict[str, Any]:
    """Return a response when it has ended."""
    while True:
        reply = get(url, response_id)
        assert reply.status_code == 200, reply.text
        if reply.json()["status"] not in ("queued", "in_progress"):
            return reply.json()  # type: ignore[no-any-return]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.fixture
def stall(engine: RealEngine, routers: Routers) -> Iterator[Callable[[], None]]:
    """Let the ranks stand still, so that nothing can end; return what lets them go on."""
    ranks = [handle.rank for handle in engine.launcher.handles]
    for rank in ranks:
        rank.hangs.set()

    def go_on() -> None:
        for rank in ranks:
            rank.hangs.clear()
            rank.freed.set()

    yield go_on
    go_on()


def num_streams(engine: RealEngine) -> int:
    assert engine.engine is not None
    return engine.engine._dispatcher.num_streams


def until_free(engine: RealEngine) -> None:
    wait_for(lambda: num_streams(engine) == 0)


SEEDED = {"input": "hello", "max_output_tokens": 40, "seed": 5, "ignore_eos": True}


def test_the_openai_client_gets_a_whole_response(routers: Routers) -> None:
    client = routers[0].client()
    response = client.responses.create(
        model="tiny",
        input="hello",
        instructions="be brief",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="me",
        extra_body={"ignore_eos": True, "seed": 1},
    )
    Response.model_validate(response.model_dump(), strict=False)
    assert response.object == "response"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata, response.user) == (
        "be brief",
        {"a": "b"},
        "me",
    )
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 7)
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 7
    assert response.usage.total_tokens == response.usage.input_tokens + 7
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert routers[1].client().responses.retrieve(response.id) == response


def test_a_stream_says_what_the_whole_response_says_in_openais_order(routers: Routers) -> None:
    url = routers[0].url
    whole = post(url, **SEEDED).json()
    events = streamed(url, **SEEDED)
    names = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert names == [*BEFORE, *["response.output_text.delta"] * len(deltas), *AFTER]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(deltas) == text_of(whole) == events[-4]["text"]
    last = events[-1]["response"]
    assert last["status"] == whole["status"] == "incomplete"
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 40
    assert text_of(last) == text_of(whole)
    assert last["output"][0] == events[-2]["item"]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


def test_the_rest_behind_every_event_is_the_same_at_every_router(routers: Routers) -> None:
    first, second = routers
    events = streamed(first.url, **SEEDED)
    response_id = events[0]["response"]["id"]
    assert rest(second.url, response_id) == events
    for number in range(len(events)):
        assert rest(second.url, response_id, number) == events[number + 1 :]
    assert rest(first.url, response_id, 10**8) == []


def test_a_stream_that_breaks_is_read_on_at_another_router(routers: Routers) -> None:
    first, second = routers
    expected = text_of(post(first.url, **SEEDED).json())
    with httpx.stream(
        "POST",
        f"{first.url}/v1/responses",
        json={"model": "tiny", "stream": True, **SEEDED},
        timeout=PATIENCE,
    ) as reply:
        begun = [event for event, _ in zip(events_of(reply.iter_lines()), range(7), strict=False)]
    after = rest(second.url, begun[0]["response"]["id"], 6)
    numbers = [event["sequence_number"] for event in [*begun, *after]]
    assert numbers == list(range(len(numbers)))
    assert "".join(event.get("delta", "") for event in [*begun, *after]) == expected


def test_a_response_in_the_background_is_found_anywhere(routers: Routers) -> None:
    first, second = routers
    expected = text_of(post(first.url, **SEEDED).json())
    reply = post(first.url, background=True, **SEEDED)
    assert reply.status_code == 200
    begun = reply.json()
    assert begun["background"]
    assert begun["status"] in ("queued", "in_progress")
    done = ended(second.url, begun["id"])
    assert done["status"] == "incomplete"
    assert text_of(done) == expected
    assert done == ended(first.url, begun["id"])


def test_a_response_that_waits_is_queued_and_has_no_output(
    routers: Routers, stall: Callable[[], None]
) -> None:
    begun = post(routers[0].url, background=True, **SEEDED).json()
    assert begun["status"] == "queued"
    assert begun["output"] == []
    assert begun["usage"] is None
    assert get(routers[1].url, begun["id"]).json() == begun
    stall()
    assert ended(routers[1].url, begun["id"])["status"] == "incomplete"


def test_a_response_in_the_background_outlives_the_router_that_took_it(
    routers: Routers, stall: Callable[[], None]
) -> None:
    first, second = routers
    begun = post(second.url, background=True, **SEEDED).json()
    second.run(second.router.close())
    stall()
    assert text_of(ended(first.url, begun["id"])) == text_of(post(first.url, **SEEDED).json())


def test_a_response_in_the_background_outlives_its_ranks(
    routers: Routers, engine: RealEngine, stall: Callable[[], None]
) -> None:
    begun = post(routers[0].url, background=True, **SEEDED).json()
    engine.launcher.handles[1].rank.fails = True
    stall()
    done = ended(routers[1].url, begun["id"])
    assert done["status"] == "incomplete"
    assert text_of(done) == text_of(post(routers[0].url, **SEEDED).json())


def test_a_stream_of_a_response_in_the_background_may_be_left_and_read_on(
    routers: Routers, stall: Callable[[], None], engine: RealEngine
) -> None:
    first, second = routers
    body = {"model": "tiny", "stream": True, "background": True, **SEEDED}
    with httpx.stream("POST", f"{first.url}/v1/responses", json=body, timeout=PATIENCE) as reply:
        events = events_of(reply.iter_lines())
        begun = [next(events) for _ in range(3)]
    assert [event["type"] for event in begun] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response_id = begun[0]["response"]["id"]
    assert num_streams(engine) == 1
    with httpx.stream(
        "GET", f"{second.url}/v1/responses/{response_id}?stream=true", timeout=PATIENCE
    ) as reply:
        again = events_of(reply.iter_lines())
        assert [next(again) for _ in range(3)] == begun
        stall()
        events_left = list(again)
    assert [e["sequence_number"] for e in events_left] == list(range(3, 3 + len(events_left)))
    assert events_left == rest(first.url, response_id, 2)
    wait_for(lambda: first.router.num_in_flight == 0)
    page = httpx.get(f"{first.url}/metrics", timeout=PATIENCE).text
    assert "Conflict" not in page  # to be read elsewhere is no failure


def test_a_cancelled_response_frees_what_it_held_and_says_so(
    routers: Routers, stall: Callable[[], None], engine: RealEngine
) -> None:
    first, second = routers
    begun = post(first.url, background=True, **SEEDED).json()
    assert num_streams(engine) == 1
    reply = httpx.post(f"{second.url}/v1/responses/{begun['id']}/cancel", timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    assert reply.json()["status"] == "cancelled"
    assert num_streams(engine) == 0
    again = httpx.post(f"{first.url}/v1/responses/{begun['id']}/cancel", timeout=PATIENCE)
    assert again.json() == reply.json() == get(first.url, begun["id"]).json()
    wait_for(lambda: first.router.num_in_flight == 0)


def test_whoever_reads_a_response_that_is_cancelled_learns_of_it(
    routers: Routers, stall: Callable[[], None]
) -> None:
    first, second = routers
    body = {"model": "tiny", "stream": True, "background": True, **SEEDED}
    with httpx.stream("POST", f"{first.url}/v1/responses", json=body, timeout=PATIENCE) as reply:
        events = events_of(reply.iter_lines())
        response_id = next(events)["response"]["id"]
        httpx.post(f"{second.url}/v1/responses/{response_id}/cancel", timeout=PATIENCE)
        last = list(events)[-1]
    assert last["response"]["status"] == "cancelled"
    assert last == rest(second.url, response_id)[-1]


def test_only_responses_in_the_background_can_be_cancelled(routers: Routers) -> None:
    client = routers[0].client()
    whole = client.responses.create(model="tiny", input="hello", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        client.responses.cancel(whole.id)
    done = client.responses.create(
        model="tiny", input="hello", max_output_tokens=2, background=True
    )
    ended(routers[0].url, done.id)
    assert client.responses.cancel(done.id).status in ("completed", "incomplete")


def test_a_deleted_response_is_gone_and_what_ran_of_it_too(
    routers: Routers, stall: Callable[[], None], engine: RealEngine
) -> None:
    first, second = routers
    begun = post(first.url, background=True, **SEEDED).json()
    reply = httpx.delete(f"{second.url}/v1/responses/{begun['id']}", timeout=PATIENCE)
    assert reply.json() == {"id": begun["id"], "object": "response", "deleted": True}
    assert num_streams(engine) == 0
    client = second.client()
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(begun["id"])


def test_a_client_that_leaves_ends_what_nobody_can_ask_for(
    routers: Routers, stall: Callable[[], None], engine: RealEngine
) -> None:
    body = json.dumps({"model": "tiny", **SEEDED}).encode()
    host, port = routers[0].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: num_streams(engine) == 1)
    until_free(engine)
    wait_for(lambda: routers[0].router.num_in_flight == 0)


def test_a_stream_that_nobody_comes_back_to_ends(
    serve: Callable[..., Serving], engine: RealEngine
) -> None:
    serving = serve(cast(FakeScheduler, engine), stream_keep=0.05)
    for handle in engine.launcher.handles:
        handle.rank.hangs.set()
    with httpx.stream(
        "POST",
        f"{serving.url}/v1/responses",
        json={"model": "tiny", "stream": True, **SEEDED},
        timeout=PATIENCE,
    ) as reply:
        response_id = next(events_of(reply.iter_lines()))["response"]["id"]
        assert num_streams(engine) == 1
    until_free(engine)
    assert get(serving.url, response_id).status_code == 404


def test_a_router_that_is_full_leaves_a_stream_to_the_next_one(
    routers: Routers,
    stall: Callable[[], None],
    engine: RealEngine,
    serve: Callable[..., Serving],
) -> None:
    full = serve(cast(FakeScheduler, Same(engine)), max_in_flight=0)
    body = {"model": "tiny", "stream": True, **SEEDED}
    with httpx.stream(
        "POST", f"{routers[0].url}/v1/responses", json=body, timeout=PATIENCE
    ) as reply:
        response_id = next(events_of(reply.iter_lines()))["response"]["id"]
    assert engine.engine is not None
    kept = engine.engine._dispatcher._kept.get(response_id)
    assert kept is not None
    wait_for(lambda: kept.timer is not None)
    assert get(full.url, response_id, stream="true").status_code == 429
    wait_for(lambda: kept.timer is not None)  # for a reader, again


def test_a_conversation_goes_on_at_another_router_as_if_it_had_been_sent_whole(
    routers: Routers,
) -> None:
    first, second = routers
    one = post(first.url, instructions="be kind", **SEEDED).json()
    more = {**SEEDED, "input": [{"role": "user", "content": "and then?"}]}
    two = post(second.url, previous_response_id=one["id"], **more).json()
    assert two["previous_response_id"] == one["id"]
    told: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text_of(one)},
        *more["input"],
    ]
    assert text_of(two) == text_of(post(first.url, **{**SEEDED, "input": told}).json())
    three = post(first.url, previous_response_id=two["id"], **{**SEEDED, "input": "so?"}).json()
    told += [{"role": "assistant", "content": text_of(two)}, {"role": "user", "content": "so?"}]
    assert text_of(three) == text_of(post(first.url, **{**SEEDED, "input": told}).json())


def test_a_conversation_goes_on_only_behind_an_answer_that_is_there(
    routers: Routers, stall: Callable[[], None]
) -> None:
    client = routers[0].client()
    begun = post(routers[0].url, background=True, **SEEDED).json()
    with pytest.raises(openai.BadRequestError, match="queued"):
        client.responses.create(model="tiny", input="x", previous_response_id=begun["id"])
    client.responses.cancel(begun["id"])
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(model="tiny", input="x", previous_response_id=begun["id"])
    with pytest.raises(openai.BadRequestError, match="not found") as raised:
        client.responses.create(model="tiny", input="x", previous_response_id="resp_" + "0" * 48)
    assert raised.value.code == "previous_response_not_found"


def test_what_is_not_stored_is_not_found(routers: Routers) -> None:
    client = routers[0].client()
    response = client.responses.create(
        model="tiny", input="hello", max_output_tokens=3, store=False
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    events = streamed(routers[0].url, store=False, **SEEDED)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_streams_and_responses_are_not_each_others(routers: Routers) -> None:
    url = routers[0].url
    response_id = post(url, **SEEDED).json()["id"]
    reply = httpx.get(f"{url}/v1/streams/{response_id}", timeout=PATIENCE)
    assert reply.status_code == 404
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"resumable": True},
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert get(url, reply.headers["x-stream-id"]).status_code == 404


KEYS = """
- {key: key-of-one, tenant: one, adapters: "*"}
- {key: key-of-two, tenant: two, adapters: "*"}
"""


def test_a_response_exists_for_its_tenant_only(
    serve: Callable[..., Serving], engine: RealEngine, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    serving = serve(cast(FakeScheduler, engine), api_key_file=str(tmp_path / "keys"))
    for handle in engine.launcher.handles:
        handle.rank.hangs.set()
    own, other = serving.client("key-of-one"), serving.client("key-of-two")
    begun = own.responses.create(model="tiny", input="hello", background=True, max_output_tokens=50)
    for ask in (
        lambda: other.responses.retrieve(begun.id),
        lambda: other.responses.retrieve(begun.id, stream=True),
        lambda: other.responses.cancel(begun.id),
        lambda: other.responses.delete(begun.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError, match="not found"):
        other.responses.create(model="tiny", input="x", previous_response_id=begun.id)
    assert num_streams(engine) == 1
    assert own.responses.cancel(begun.id).status == "cancelled"


async def test_the_async_client_streams_and_resumes(routers: Routers) -> None:
    first = openai.AsyncOpenAI(
        base_url=f"{routers[0].url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )
    second = openai.AsyncOpenAI(
        base_url=f"{routers[1].url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )
    async with first, second:
        stream = await first.responses.create(
            model="tiny",
            input="hello",
            max_output_tokens=30,
            background=True,
            stream=True,
            extra_body={"seed": 5, "ignore_eos": True},
        )
        events = [event async for event in stream]
        created = events[0]
        assert created.type == "response.created"
        rest_of = await second.responses.retrieve(
            created.response.id, stream=True, starting_after=6
        )
        assert [event async for event in rest_of] == events[7:]
        done = await second.responses.retrieve(created.response.id)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == done.output_text
