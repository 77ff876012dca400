"""Events of a response: their numbers are a function of its tokens, however these come."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.responses.events import ResponseEvents
from cluster.api.responses.objects import Settings
from cluster.api.responses.record import ResponseRecord, new_id
from cluster.api.responses.stored import TOKENS_AT_ONCE, StoredResponse, replay
from cluster.errors import ErrorInfo
from cluster.messages import Claimed
from cluster.request import FinishReason, Request, TokenEvent
from cluster.router.output_processor import OutputProcessor, TextOptions
from cluster.router.tokenizer import Tokenizer
from tests.random_cases import num_cases
from worker.protocol import SamplingParams

EOS = 2
SETTINGS = Settings(
    model="tiny",
    background=False,
    instructions=None,
    max_output_tokens=None,
    metadata={},
    previous_response_id=None,
    parallel_tool_calls=True,
    store=True,
    temperature=1.0,
    tool_choice="auto",
    top_logprobs=0,
    top_p=1.0,
    truncation="disabled",
    user=None,
)
RECORD = ResponseRecord(
    id=new_id(),
    created_at=1,
    tenant="",
    names=("tiny",),
    options=TextOptions((), False, True, 0),
    shows_logprobs=False,
    is_streamed=True,
    settings=SETTINGS,
    turns=msgspec.Raw(b"\x90"),
)
REQUEST = Request("r", "base", (3, 4), SamplingParams(), max_tokens=1000, stop_token_ids=(EOS,))


def messages(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]


def told(
    tokenizer: Tokenizer, past: list[TokenEvent], after: float = -1
) -> tuple[list[dict[str, Any]], ResponseEvents]:
    processor = OutputProcessor(tokenizer, REQUEST, RECORD.options)
    events = ResponseEvents(RECORD, tokenizer, processor, after)

    async def read() -> bytes:
        return b"".join([part async for part in replay(events, processor, tuple(past))])

    return messages(asyncio.run(read())), events


def cut(
    tokens: list[int], cuts: list[int], end: FinishReason | None, error: ErrorInfo | None = None
) -> list[TokenEvent]:
    """Return an answer as events whose tokens are cut at some places."""
    bounds = [0, *sorted({place % (len(tokens) + 1) for place in cuts}), len(tokens)]
    past = [TokenEvent("r", tuple(tokens[a:b])) for a, b in zip(bounds, bounds[1:], strict=False)]
    return [*past, TokenEvent("r", finish_reason=end, error=error)] if end is not None else past


@settings(max_examples=num_cases(60), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 299), max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    end=st.sampled_from(["stop", "length", "abort", "error", None]),
    after=st.integers(-1, 60),
)
def test_however_tokens_come_the_events_are_the_same_and_each_rest_is_a_rest(
    tokenizer: Tokenizer, tokens: list[int], cuts: list[int], end: Any, after: int
) -> None:
    error = ErrorInfo("Internal", "why") if end == "error" else None
    one_by_one, events = told(tokenizer, cut(tokens, list(range(100)), end, error))
    assert told(tokenizer, cut(tokens, cuts, end, error))[0] == one_by_one
    assert told(tokenizer, cut(tokens, cuts, end, error), after)[0] == one_by_one[after + 1 :]
    assert [event["sequence_number"] for event in one_by_one] == list(range(len(one_by_one)))
    deltas = "".join(event.get("delta", "") for event in one_by_one)
    assert deltas == events.text
    has_ended = end is not None or EOS in tokens
    assert events.has_ended == has_ended
    if has_ended:
        assert one_by_one[-1]["response"]["status"] == events.status


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("stop", "completed", "response.completed"),
        ("length", "incomplete", "response.incomplete"),
        ("abort", "cancelled", "response.incomplete"),
        ("error", "failed", "response.failed"),
    ],
)
def test_how_an_answer_ended_is_told(
    tokenizer: Tokenizer, end: FinishReason, status: str, last: str
) -> None:
    error = ErrorInfo("DeadlineExceeded", "too long") if end == "error" else None
    said, events = told(tokenizer, cut([10, 11], [1], end, error))
    response = events.response()
    assert (response.status, said[-1]["type"]) == (status, last)
    assert (response.error is not None) == (end == "error")
    assert (response.incomplete_details is not None) == (end == "length")
    assert response.output[0].status == ("completed" if end == "stop" else "incomplete")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (2, 2)


def test_an_answer_without_text_is_an_empty_message(tokenizer: Tokenizer) -> None:
    said, events = told(tokenizer, [TokenEvent("r", (EOS,), finish_reason="stop")])
    assert [event["type"] for event in said] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events.response().output[0].content[0].text == ""


async def test_a_long_answer_is_followed_in_parts_between_which_others_have_their_turn(
    tokenizer: Tokenizer,
) -> None:
    past = (TokenEvent("r", (10,) * (3 * TOKENS_AT_ONCE)),)
    stored = StoredResponse(RECORD, Claimed(1, "", b"", (REQUEST,), (past,)))
    processor = OutputProcessor(tokenizer, REQUEST, RECORD.options)
    events = ResponseEvents(RECORD, tokenizer, processor)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    parts = [part async for part in replay(events, processor, stored.past)]
    task.cancel()
    assert len(parts) == 4
    assert turns >= 3
    assert not stored.has_ended
