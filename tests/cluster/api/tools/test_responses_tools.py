"""Tools and thoughts in /v1/responses: items, events, and conversations that go on."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.api.responses.events import ResponseEvents
from cluster.api.responses.items import turns_of
from cluster.api.responses.record import ResponseRecord
from cluster.errors import InvalidRequest
from cluster.request import Request, TokenEvent
from cluster.router.output_processor import OutputProcessor
from cluster.router.parser.families import MessageFormat
from cluster.router.tokenizer import Tokenizer
from tests.cluster.api.responses.test_events import RECORD
from tests.cluster.api.tools.conftest import NOW, WEATHER
from tests.cluster.conftest import EOS, Serving
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

ARGUMENTS = '{"city": "Zürich 🌳", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n" + '<tool_call>{"name": "now"}</tool_call>'
TOOLS = [{"type": "function", **one["function"]} for one in (WEATHER, NOW)]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
Start = Callable[..., Serving]


def post(serving: Serving, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "input": "hello", "store": False} | body
    return httpx.post(f"{serving.url}/v1/responses", json=whole, timeout=PATIENCE)


def events_of(serving: Serving, **body: Any) -> list[dict[str, Any]]:
    lines = post(serving, stream=True, **body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for event in events:
        EVENTS.validate_python(event, strict=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_an_output_has_thoughts_a_message_and_calls(start: Start) -> None:
    serving = start("thinking", TEXT)
    reply = serving.client().responses.create(model="tiny", input="hello", tools=TOOLS, store=False)
    assert [item.type for item in reply.output] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    thoughts, message, weather, now = (item.model_dump() for item in reply.output)
    assert thoughts["content"][0]["text"] == "hm"
    assert (reply.output_text, message["status"]) == ("I look.", "completed")
    assert (weather["name"], weather["arguments"]) == ("get_weather", ARGUMENTS)
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert weather["call_id"] != now["call_id"]
    assert len({item["id"] for item in (thoughts, message, weather, now)}) == 4
    assert reply.status == "completed"
    assert [tool.name for tool in reply.tools] == ["get_weather", "now"]


def test_thoughts_may_be_left_out_and_the_template_is_told_what_a_caller_says(start: Start) -> None:
    serving = start("thinking", TEXT)
    reply = post(serving, tools=TOOLS, include_reasoning=False).json()
    assert [item["type"] for item in reply["output"]] == ["message", *["function_call"] * 2]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    for told in ({"enable_thinking": False}, {"enable_thinking": True}):
        post(serving, chat_template_kwargs=told)
        body = chat | {"chat_template_kwargs": told}
        httpx.post(f"{serving.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        here, there = (request.token_ids for request in serving.schedulers[0].submitted[-2:])
        assert here == there
    first, second = (serving.schedulers[0].submitted[number].token_ids for number in (-1, -3))
    assert first != second
    reply = post(serving, chat_template_kwargs={"a": [0] * 20_000})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_stream_tells_each_item_from_its_beginning_to_its_end(start: Start) -> None:
    events = events_of(start("thinking", TEXT), tools=TOOLS)
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    added = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    for index, item in enumerate(final["output"]):
        pieces = [
            e["delta"]
            for e in events
            if e["type"].endswith(".delta") and e["output_index"] == index
        ]
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(pieces) == text
    assert sum(e["type"] == "response.function_call_arguments.done" for e in events) == 2
    kinds = [e["type"] for e in events if e.get("output_index") == 0]
    assert kinds[:3] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
    ]


def test_a_call_that_is_cut_short_is_incomplete(start: Start) -> None:
    serving = start("hermes", CALL, ends=False)
    count = len(serving.router.tokenizer.encode(CALL[: CALL.index('", "days"')], False))
    reply = post(serving, tools=TOOLS, max_output_tokens=count).json()
    (call,) = reply["output"]
    assert (reply["status"], call["status"]) == ("incomplete", "incomplete")
    assert call["arguments"] == '{"city": "Zürich 🌳'


def test_an_answer_without_text_is_an_empty_message(start: Start) -> None:
    reply = post(start("hermes", ""), tools=TOOLS).json()
    assert [item["type"] for item in reply["output"]] == ["message"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "now"]),
        ({"type": "function", "name": "now"}, ["now"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "now"}],
            },
            ["now"],
        ),
    ],
)
def test_what_must_be_called_is_a_grammar(start: Start, choice: Any, names: list[str]) -> None:
    serving = start("hermes", "")
    assert post(serving, tools=TOOLS, tool_choice=choice).status_code == 200
    grammar = serving.schedulers[0].submitted[-1].sampling.grammar
    assert [name for name in ("get_weather", "now") if f'\\"{name}\\"' in grammar] == names


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"guided_regex": "("}, "guided_regex"),
    ],
)
def test_what_cannot_be_served_is_refused(start: Start, body: dict[str, Any], param: str) -> None:
    reply = post(start("hermes", "ok"), **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_thoughts_and_calls_of_the_input_reach_the_template(start: Start) -> None:
    serving = start("thinking", "ok")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city": "x"}'}
    thoughts = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    asked = [{"role": "user", "content": "a"}, thoughts, call, output]
    assert post(serving, input=asked, tools=TOOLS).status_code == 200
    request = serving.schedulers[0].submitted[-1]
    prompt = serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert "<|im_start|>assistant\n[hm]<call c1 f x><|im_end|>" in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


def test_thoughts_go_with_the_message_behind_them() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    message = {"role": "assistant", "content": "so"}
    assert turns_of([thoughts, message]) == [
        {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    ]
    with pytest.raises(InvalidRequest, match="part of type reasoning_text"):
        turns_of([{"type": "reasoning", "content": [{"type": "text", "text": "hm"}]}])
    with pytest.raises(InvalidRequest, match="nothing in it"):
        turns_of([{"type": "reasoning", "summary": []}])


def test_whoever_reads_on_behind_an_event_counts_and_reads_the_same(tokenizer: Tokenizer) -> None:
    request = Request("r", "base", (5,), SamplingParams(seed=0), 1000, (EOS,))
    functions = {one["name"]: one.get("parameters", {}) for one in TOOLS}
    record = msgspec.structs.replace(
        RECORD, message_format=MessageFormat("hermes", functions, reasoning="qwen3")
    )
    tokens = tokenizer.encode(TEXT, False) + (EOS,)

    def told(after: float) -> tuple[list[bytes], ResponseEvents]:
        processor = OutputProcessor(tokenizer, request, record.options)
        events = ResponseEvents(record, tokenizer, processor, after)
        parts = [events.opening()]
        for token in tokens:
            delta = processor.process(TokenEvent("r", (token,), finish_reason=None))
            if delta is not None:
                parts.append(events.grow(delta))
        return [one for one in b"".join(parts).split(b"\n\n") if one], events

    whole, events = told(-1)
    for after in range(len(whole)):
        assert told(after)[0] == whole[after + 1 :]
    turn = events.turn()
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [ARGUMENTS, "{}"]
    data = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(data, type=ResponseRecord).message_format == record.message_format
