"""Objects, calls, vectors and many calls at once by the openai package, of a served model."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.server import MODELS, Server
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]
ORDER = "Book a table for two, outside, please."
ASKED: Any = [{"role": "user", "content": ORDER}]


class Booking(BaseModel):
    """A table that is booked."""

    people: int = Field(ge=1, le=20)
    place: Literal["inside", "outside"]


def settings(server: Server) -> dict[str, Any]:
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": PATIENCE,
    }


@pytest.mark.parametrize("model", MODELS[:2])
def test_chats_are_parsed_into_objects_streamed_or_not(server: Server, model: str) -> None:
    ask: Any = {"model": model, "messages": ASKED, "temperature": 0, "max_tokens": 60}
    with openai.OpenAI(**settings(server)) as client:
        whole = client.chat.completions.parse(response_format=Booking, **ask).choices[0].message
        assert isinstance(whole.parsed, Booking)
        with client.chat.completions.stream(response_format=Booking, **ask) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == whole.parsed
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)


@pytest.mark.parametrize("model", MODELS[:2])
def test_calls_are_parsed_into_objects_streamed_or_not(server: Server, model: str) -> None:
    ask: Any = {
        "model": model,
        "messages": ASKED,
        "tools": [openai.pydantic_function_tool(Booking)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    with openai.OpenAI(**settings(server)) as client:
        (call,) = client.chat.completions.parse(**ask).choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Booking)
        with client.chat.completions.stream(**ask) as stream:
            kinds = {event.type for event in stream}
            (again,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert again.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.done" in kinds


@pytest.mark.parametrize("model", MODELS[:2])
def test_responses_are_parsed_into_objects_streamed_or_not(server: Server, model: str) -> None:
    ask: Any = {"model": model, "input": ORDER, "temperature": 0, "max_output_tokens": 60}
    with openai.OpenAI(**settings(server)) as client:
        whole = client.responses.parse(text_format=Booking, **ask).output_parsed
        assert isinstance(whole, Booking)
        with client.responses.stream(text_format=Booking, **ask) as stream:
            stream.until_done()
            assert stream.get_final_response().output_parsed == whole
        tools: Any = [openai.pydantic_function_tool(Booking)["function"] | {"type": "function"}]
        called = client.responses.parse(
            tools=tools, tool_choice="required", parallel_tool_calls=False, **ask
        )
    (call,) = called.output
    assert call.type == "function_call"
    assert Booking.model_validate_json(call.arguments)


def test_vectors_are_the_same_as_base64_and_as_numbers_and_of_their_model(server: Server) -> None:
    texts = ["a sunny day", "rain all day"]
    with openai.OpenAI(**settings(server)) as client:
        found = {
            model: [
                one.embedding for one in client.embeddings.create(model=model, input=texts).data
            ]
            for model in MODELS[:2]
        }
        numbers = client.embeddings.create(
            model=MODELS[0], input=texts, encoding_format="float"
        ).data
    assert [one.embedding for one in numbers] == found[MODELS[0]]
    assert found[MODELS[0]] != found[MODELS[1]]
    assert [len(vector) for vector in found[MODELS[0]]] == [576, 576]


def test_the_async_client_chats_streams_parses_and_embeds_many_at_once(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, model: str) -> tuple[str, Booking, list[float]]:
        common: Any = {"model": model, "temperature": 0, "max_tokens": 24}
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        whole, parts, formed, vectors = await asyncio.gather(
            client.chat.completions.create(messages=messages, **common),
            client.chat.completions.create(messages=messages, stream=True, **common),
            client.chat.completions.parse(messages=ASKED, response_format=Booking, **common),
            client.embeddings.create(model=model, input=QUESTIONS[0]),
        )
        said = "".join([c.choices[0].delta.content or "" async for c in parts])
        assert said == whole.choices[0].message.content
        booking = formed.choices[0].message.parsed
        assert isinstance(booking, Booking)
        return said, booking, vectors.data[0].embedding

    async def ask_all() -> list[tuple[str, Booking, list[float]]]:
        async with openai.AsyncOpenAI(**settings(server)) as client:
            return await asyncio.gather(*(ask(client, model) for model in [*some, *some]))

    some = MODELS[:3]
    answers = asyncio.run(ask_all())
    assert answers[: len(some)] == answers[len(some) :]
