"""Streams with calls and thoughts that are read on behind any token: the same is said in all."""

import json
from typing import Any

import msgspec
import pytest

from cluster.api.response_builder import Choice, ResponseMetadata
from cluster.api.resumable import StreamRecord, fed
from cluster.api.routes.chat import ChatResponseBuilder
from cluster.request import Request, TokenEvent
from cluster.router.output_processor import OutputProcessor, TextOptions
from cluster.router.parser.families import MessageFormat
from cluster.router.tokenizer import Tokenizer
from tests.cluster.api.tools.conftest import NOW, WEATHER
from tests.cluster.conftest import EOS
from worker.protocol import SamplingParams

TEXT = (
    "<think>\nhm 🌳\n</think>\n\nI look: <tool_\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
    '\n<tool_call>{"name": "nobody"}</tool_call> \n<tool_call>{"name": "now"}</tool_call>'
)
FORM = MessageFormat(
    tool_calls="hermes",
    functions={
        one["function"]["name"]: one["function"].get("parameters", {}) for one in (WEATHER, NOW)
    },
    reasoning="qwen3",
)
METADATA = ResponseMetadata("chatcmpl-r", 0, "tiny", False, False)


def events_of(tokens: tuple[int, ...]) -> list[TokenEvent]:
    last = len(tokens) - 1
    return [
        TokenEvent("r", (token,), (), (), 0, "stop" if number == last else None)
        for number, token in enumerate(tokens)
    ]


def said(parts: list[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "ends": []}
    for line in b"".join(parts).split(b"\n\n"):
        if not line:
            continue
        (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
        found["content"] += choice["delta"].get("content", "")
        found["reasoning"] += choice["delta"].get("reasoning_content", "")
        for part in choice["delta"].get("tool_calls", ()):
            call = found["calls"].setdefault(part["index"], {"arguments": ""})
            call["arguments"] += part["function"].pop("arguments")
            new = {"id": part["id"], **part["function"]} if "id" in part else {}
            assert not set(new) & set(call)
            call.update(new)
        found["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


@pytest.mark.parametrize("stops", [(), ("days",), ("</tool_call>",)])
def test_a_stream_read_on_behind_any_token_says_the_same(
    tokenizer: Tokenizer, stops: tuple[str, ...]
) -> None:
    tokens = tokenizer.encode(TEXT, False) + (EOS,)
    request = Request("r", "base", (5,), SamplingParams(seed=0), 1000, (EOS,))
    options = TextOptions(stops, False, True, 0)

    def spelled(count: int | None) -> dict[str, Any]:
        """Return what is said of an answer that is read, and read on behind so many tokens."""
        events = events_of(tokens)
        first = ChatResponseBuilder(tokenizer, METADATA, False, FORM)
        processor = OutputProcessor(tokenizer, request, options)
        parts: list[bytes] = []
        for event in events[:count]:
            delta = processor.process(event)
            if delta is not None:
                parts.append(first.chunk(Choice(0, (5,), delta, is_first=not parts)))
            if processor.finish_reason is not None:
                return said(parts)
        second = ChatResponseBuilder(tokenizer, METADATA, False, FORM)
        processor = OutputProcessor(tokenizer, request, options)
        has, lacks = fed(processor, events, count or 0)
        if has is not None:
            second.chunk(Choice(0, (5,), has, is_first=True))
        if lacks is not None:
            parts.append(second.chunk(Choice(0, (5,), lacks, is_first=has is None)))
        return said(parts)

    whole = spelled(len(tokens))
    assert whole["reasoning"] == "hm 🌳"
    assert whole["content"].startswith("I look: <tool_")
    assert whole["ends"] == ["tool_calls"]
    for count in range(len(tokens)):
        assert spelled(count) == whole, count


def test_another_router_takes_the_answer_apart_as_the_first_did() -> None:
    record = StreamRecord(
        "chat", "t", ("tiny",), METADATA, TextOptions((), False, True, 0, (7, 9)), False, FORM
    )
    data = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(data, type=StreamRecord) == record
