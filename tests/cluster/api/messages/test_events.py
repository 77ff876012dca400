"""Events of a message: however its tokens come, they spell what the whole says."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.messages.events import MessageEvents
from cluster.errors import Overloaded
from cluster.request import FinishReason, Request, TokenEvent
from cluster.router.output_processor import OutputProcessor, TextOptions
from cluster.router.parser.families import MessageFormat
from cluster.router.tokenizer import Tokenizer
from worker.protocol import SamplingParams

EOS = 2
REQUEST = Request("r", "base", (3, 4, 5), SamplingParams(), max_tokens=1000, stop_token_ids=(EOS,))


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for part in data.decode().split("\n\n")[:-1]:
        name, _, body = part.partition("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def told(
    tokenizer: Tokenizer,
    batches: list[tuple[int, ...]],
    finish_reason: FinishReason,
    stops: tuple[str, ...] = (),
    message_format: MessageFormat | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of an answer that comes in batches of tokens, and the whole of it."""
    processor = OutputProcessor(tokenizer, REQUEST, TextOptions(stops, False, True, 0))
    events = MessageEvents("msg_r", "tiny", processor, message_format)
    data = b""
    for number, tokens in enumerate(batches):
        reason = finish_reason if number == len(batches) - 1 else None
        delta = processor.process(
            TokenEvent("r", tokens, num_cached_tokens=2, finish_reason=reason)
        )
        if delta is not None:
            data += events.grow(delta)
        if processor.finish_reason is not None:
            break
    return events_of(data), json.loads(msgspec.json.encode(events.message()))


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a reader of the events has at their end."""
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == []
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use" and arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


@given(text=st.text(max_size=12), cuts=st.sets(st.integers(1, 60)), ends=st.booleans())
def test_events_spell_the_whole_however_the_tokens_come(
    tokenizer: Tokenizer, text: str, cuts: set[int], ends: bool
) -> None:
    tokens = tokenizer.encode(text, False) + ((EOS,) if ends else (65,))
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    batches = [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    events, whole = told(tokenizer, batches, "stop" if ends else "length")
    assert joined(events) == whole
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    names = [event["type"] for event in events[2:-2]]
    if names:
        deltas = ["content_block_delta"] * (len(names) - 2)
        assert names == ["content_block_start", *deltas, "content_block_stop"]
    assert whole["stop_reason"] == ("end_turn" if ends else "max_tokens")
    assert whole["stop_sequence"] is None
    assert whole["usage"] == {
        "input_tokens": 1,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(tokens),
    }


def test_a_stop_sequence_is_named_and_not_shown(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello world", False)
    events, whole = told(tokenizer, [(token,) for token in tokens], "length", ("wor",))
    assert joined(events) == whole
    assert whole["content"] == [{"type": "text", "text": "hello "}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "wor")


def test_an_answer_that_says_nothing_has_no_block(tokenizer: Tokenizer) -> None:
    events, whole = told(tokenizer, [(EOS,)], "stop")
    assert whole["content"] == []
    assert joined(events) == whole


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (418, "api_error")])
def test_a_stream_breaks_off_with_an_event(tokenizer: Tokenizer, status: int, kind: str) -> None:
    class Odd(Overloaded):
        pass

    Odd.status = status
    processor = OutputProcessor(tokenizer, REQUEST, TextOptions((), False, True, 0))
    data = MessageEvents("msg_r", "tiny", processor).fail(Odd("too much"), "id")
    (event,) = events_of(data)
    assert event == {
        "type": "error",
        "error": {"type": kind, "message": "too much"},
        "request_id": "id",
    }


FORMAT = MessageFormat(
    tool_calls="hermes",
    functions={"f": {}, "g": {}},
    is_parallel=True,
    reasoning="qwen3",
    begins_in_thought=False,
    shows_reasoning=True,
)
CALLS = (
    "<think>hm</think>I call. "
    '<tool_call>{"name": "f", "arguments": {"a": [1, "x"]}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call> and say'
)


@given(cuts=st.sets(st.integers(1, 200)))
def test_thoughts_texts_and_calls_are_blocks_in_order_however_the_tokens_come(
    tokenizer: Tokenizer, cuts: set[int]
) -> None:
    tokens = (*tokenizer.encode(CALLS, False), EOS)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    batches = [tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    events, whole = told(tokenizer, batches, "stop", message_format=FORMAT)
    assert joined(events) == whole
    assert [block["type"] for block in whole["content"]] == [
        *("thinking", "text", "tool_use", "tool_use", "text"),
    ]
    thought, text, one, two, rest = whole["content"]
    assert (thought["thinking"], text["text"], rest["text"]) == ("hm", "I call.", "and say")
    assert (one["name"], one["input"]) == ("f", {"a": [1, "x"]})
    assert (two["name"], two["input"]) == ("g", {})
    assert one["id"] != two["id"]
    assert whole["stop_reason"] == "tool_use"


def test_arguments_that_are_no_object_are_told_as_they_are(tokenizer: Tokenizer) -> None:
    said = '<tool_call>{"name": "f", "arguments": {"a": nonsense</tool_call>'
    _, whole = told(tokenizer, [(*tokenizer.encode(said, False), EOS)], "stop", (), FORMAT)
    (call,) = whole["content"]
    assert set(call["input"]) == {"arguments"}
    assert "nonsense" in call["input"]["arguments"]
