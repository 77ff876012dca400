"""The Responses API of a served model: real processes, the real openai client, two ranks."""

import asyncio
from typing import Any

import openai
import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.server import MODELS, Server
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )


def test_responses_are_the_answers_of_chats_streamed_or_not(server: Server) -> None:
    client = client_of(server)
    ask: Any = {"model": "smollm2", "temperature": 0}
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    chat = client.chat.completions.create(messages=messages, max_tokens=24, **ask)
    whole = client.responses.create(input=QUESTIONS[0], max_output_tokens=24, **ask)
    assert whole.output_text == chat.choices[0].message.content
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    stream = client.responses.create(input=QUESTIONS[0], max_output_tokens=24, stream=True, **ask)
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    first: Any = events[0]
    for after in (0, 5, len(events) - 1):
        rest = client.responses.retrieve(first.response.id, stream=True, starting_after=after)
        assert list(rest) == events[after + 1 :]


def test_a_conversation_goes_on_by_the_id_of_its_last_response(server: Server) -> None:
    client = client_of(server)
    ask: Any = {"model": MODELS[1], "temperature": 0, "max_output_tokens": 16}
    one = client.responses.create(input="My name is Ada.", **ask)
    two = client.responses.create(input="Who am I?", previous_response_id=one.id, **ask)
    told: Any = [
        {"role": "user", "content": "My name is Ada."},
        *one.output,
        {"role": "user", "content": "Who am I?"},
    ]
    assert client.responses.create(input=told, **ask).output_text == two.output_text


def test_a_response_in_the_background_is_polled_cancelled_and_deleted(server: Server) -> None:
    client = client_of(server)
    endless: Any = {"ignore_eos": True, "seed": 1}
    begun = client.responses.create(
        model="smollm2",
        input="Count:",
        background=True,
        max_output_tokens=6000,
        extra_body=endless,
    )
    assert begun.status in ("queued", "in_progress")
    wait_for(lambda: client.responses.retrieve(begun.id).status == "in_progress")
    assert client.responses.cancel(begun.id).status == "cancelled"
    wait_for(lambda: server.metric("topwork_requests_running") == 0)
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_the_async_client_streams_what_goes_on_in_the_background(server: Server) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            stream = await client.responses.create(
                model="smollm2",
                input="Count:",
                background=True,
                stream=True,
                max_output_tokens=60,
                extra_body={"ignore_eos": True, "seed": 1},
            )
            events: list[Any] = []
            async with stream:
                async for event in stream:
                    events.append(event)
                    if len(events) == 9:
                        break
            response_id = events[0].response.id
            rest = await client.responses.retrieve(response_id, stream=True, starting_after=8)
            events += [event async for event in rest]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            done = await client.responses.retrieve(response_id)
            assert done.status == "incomplete"
            deltas = (e.delta for e in events if e.type == "response.output_text.delta")
            assert "".join(deltas) == done.output_text

    asyncio.run(ask())
