"""The inputs of responses over a real engine and two routers: listed and counted."""

from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from cluster.api.responses.input_items import input_items
from cluster.api.responses.items import turns_of
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

Routers = tuple[Serving, Serving]
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
INPUT: list[dict[str, Any]] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
    {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}],
     "summary": []},
    {"role": "assistant", "content": [{"type": "output_text", "text": "here"}]},
    {"role": "user", "content": "and now?"},
]  # fmt: skip


def post(serving: Serving, path: str = "", **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "input": INPUT, "max_output_tokens": 3} | body
    return httpx.post(f"{serving.url}/v1/responses{path}", json=whole, timeout=PATIENCE)


def test_the_items_of_an_input_are_listed_by_any_router_page_by_page(routers: Routers) -> None:
    first, second = routers
    response_id = post(first).json()["id"]
    listed = second.client().responses.input_items.list(response_id, order="asc", limit=2)
    items = [item.model_dump(exclude_none=True) for item in listed]  # the client turns the pages
    for item in items:
        ITEM.validate_python(item, strict=False)
    assert [item["type"] for item in items] == [
        "message", "message", "reasoning", "message", "message",
    ]  # fmt: skip
    assert len({item["id"] for item in items}) == 5
    said = [item["content"][0]["text"] for item in items]
    assert said == ["be brief", "where?", "hm", "here", "and now?"]
    assert [item.get("role") for item in items] == [
        "developer", "user", None, "assistant", "user",
    ]  # fmt: skip
    back = first.client().responses.input_items.list(response_id)
    assert [item.id for item in back] == [item["id"] for item in reversed(items)]


def test_what_went_before_is_part_of_the_input(routers: Routers) -> None:
    first, second = routers
    answer = post(first, input="hello").json()
    response_id = post(second, input="on", previous_response_id=answer["id"]).json()["id"]
    url = f"{first.url}/v1/responses/{response_id}/input_items?order=asc"
    items = httpx.get(url, timeout=PATIENCE).json()["data"]
    assert [item["content"][0]["text"] for item in items] == [
        "hello", answer["output"][0]["content"][0]["text"], "on",
    ]  # fmt: skip


def test_calls_and_what_they_gave_are_items(routers: Routers) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    said = [{"role": "user", "content": "go"}, call]
    response_id = post(routers[0], input=said).json()["id"]
    url = f"{routers[1].url}/v1/responses/{response_id}/input_items?order=asc"
    items = httpx.get(url, timeout=PATIENCE).json()["data"]
    assert items[1] == call | {"id": items[1]["id"], "status": "completed"}
    (made,) = input_items("resp_1", turns_of([output]))  # this model's template takes none
    assert (made.id, made.call_id, made.output) == ("fco_1_in0", "c1", "2")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=%C2%B2", "limit"),
        ("order=up", "order"),
        ("after=msg_x", "after"),
    ],
)
def test_a_page_that_makes_no_sense_is_refused(routers: Routers, query: str, param: str) -> None:
    response_id = post(routers[0]).json()["id"]
    url = f"{routers[1].url}/v1/responses/{response_id}/input_items?{query}"
    reply = httpx.get(url, timeout=PATIENCE)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_response_that_is_not_there_has_no_input(routers: Routers) -> None:
    reply = httpx.get(f"{routers[0].url}/v1/responses/resp_x/input_items", timeout=PATIENCE)
    assert reply.status_code == 404


def test_counted_is_what_a_response_has_as_its_input(routers: Routers) -> None:
    first, second = routers
    for body in ({}, {"instructions": "be kind"}, {"input": "hello"}):
        answer = post(first, **body).json()
        counted = post(second, "/input_tokens", **body).json()
        usage = answer["usage"]["input_tokens"]
        assert counted == {"object": "response.input_tokens", "input_tokens": usage}
    following: dict[str, Any] = {"input": "on", "previous_response_id": answer["id"]}
    usage = post(first, **following).json()["usage"]["input_tokens"]
    counted = second.client().responses.input_tokens.count(model="tiny", **following)
    assert counted.input_tokens == usage
    assert post(first, "/input_tokens", model="king").status_code == 404
    assert post(first, "/input_tokens", input=[]).status_code == 400
