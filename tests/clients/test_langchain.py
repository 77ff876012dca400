"""LangChain's OpenAI and Anthropic packages against a served model."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS
from tests.patience import PATIENCE

SOME = MODELS[:2]  # the base model and an adapter
QUESTION = "Tell me the capital of France."
ORDER = "Book a table for two, outside, please."


class Booking(BaseModel):
    """A table that is booked."""

    people: Literal[1, 2, 3, 4]  # Anthropic's package keeps bounds of numbers to itself
    place: Literal["inside", "outside"]


@tool
def book_table(people: int, place: Literal["inside", "outside"]) -> str:
    """Book a table."""
    return f"A table for {people} is booked {place}."


def chat_model(server: Endpoint, model: str = "smollm2", **extra: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=60,
        max_retries=0,
        timeout=PATIENCE,
        **extra,
    )


def anthropic_model(server: Endpoint, model: str = "smollm2", **extra: Any) -> ChatAnthropic:
    return ChatAnthropic(
        model=model,
        base_url=server.url,
        api_key="none",
        max_tokens=60,
        max_retries=0,
        timeout=PATIENCE,
        **extra,
    )


@pytest.mark.parametrize("model", SOME)
def test_invoke_stream_batch_and_their_async_twins_say_the_same(
    server: Endpoint, model: str, run: Callable[..., Any]
) -> None:
    chat = chat_model(server, model, stream_usage=True)
    whole = chat.invoke(QUESTION)
    assert whole.text
    assert whole.response_metadata["finish_reason"] == "stop"
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum(chunks[1:], chunks[0]).usage_metadata == whole.usage_metadata
    assert [one.text for one in chat.batch([QUESTION, QUESTION])] == [whole.text] * 2

    async def ask() -> None:
        assert (await chat.ainvoke(QUESTION)).text == whole.text
        streamed = [chunk.text async for chunk in chat.astream(QUESTION)]
        assert "".join(streamed) == whole.text

    run(ask())


@pytest.mark.parametrize("model", SOME)
@pytest.mark.parametrize("choice", ["any", "book_table"])
def test_a_bound_tool_that_must_be_called_is_called_and_its_result_goes_back(
    server: Endpoint, model: str, choice: str
) -> None:
    chat = chat_model(server, model)
    bound = chat.bind_tools([book_table], tool_choice=choice, parallel_tool_calls=False)
    answer = bound.invoke(ORDER)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "book_table"
    result = book_table.invoke(call)
    assert isinstance(result, ToolMessage)
    talk: list[BaseMessage] = [HumanMessage(ORDER), answer, result]
    after = chat.bind_tools([book_table]).invoke(talk)
    assert isinstance(after, AIMessage)
    assert after.text or after.tool_calls
    chunks = list(bound.stream(ORDER))
    streamed = sum(chunks[1:], chunks[0])
    assert isinstance(streamed, AIMessage)
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [
        (call["name"], call["args"])
    ]


def test_a_bound_tool_may_be_called_strictly_or_not(server: Endpoint) -> None:
    for strict in (None, True):
        answer = chat_model(server).bind_tools([book_table], strict=strict).invoke(ORDER)
        assert answer.text or answer.tool_calls
        assert not answer.invalid_tool_calls


@pytest.mark.parametrize("model", SOME)
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(
    server: Endpoint,
    model: str,
    method: Literal["json_schema", "function_calling"],
    run: Callable[..., Any],
) -> None:
    formed = chat_model(server, model).with_structured_output(Booking, method=method)
    booking = formed.invoke(ORDER)
    assert isinstance(booking, Booking)
    assert run(formed.ainvoke(ORDER)) == booking
    assert list(formed.stream(ORDER))[-1] == booking


def test_json_mode_gives_an_object(server: Endpoint) -> None:
    chat = chat_model(server, "json").with_structured_output(None, method="json_mode")
    assert isinstance(chat.invoke(QUESTION), dict)


def test_the_responses_api_says_what_chats_say(server: Endpoint) -> None:
    by_chats, by_responses = chat_model(server), chat_model(server, use_responses_api=True)
    whole = by_responses.invoke(QUESTION)
    assert whole.text == by_chats.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in by_responses.stream(QUESTION)) == whole.text
    (call,) = by_responses.bind_tools([book_table], tool_choice="any").invoke(ORDER).tool_calls
    assert isinstance(book_table.invoke(call), ToolMessage)
    formed = by_responses.with_structured_output(Booking, method="json_schema")
    assert isinstance(formed.invoke(ORDER), Booking)


def test_embeddings_of_texts_are_those_of_the_model(
    server: Endpoint, run: Callable[..., Any]
) -> None:
    embeddings = OpenAIEmbeddings(
        model="smollm2",
        base_url=f"{server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,  # else it sends token ids of OpenAI's models
    )
    texts = ["a sunny day", "rain all day", "a sunny day"]
    vectors = embeddings.embed_documents(texts)
    assert vectors[0] == vectors[2] == embeddings.embed_query(texts[0])
    assert vectors[0] != vectors[1]
    assert len(vectors[0]) == 576
    assert run(embeddings.aembed_documents(texts)) == vectors


@pytest.mark.parametrize("model", SOME)
def test_the_anthropic_package_says_what_the_openai_package_says(
    server: Endpoint, model: str, run: Callable[..., Any]
) -> None:
    chat = anthropic_model(server, model, temperature=0)
    whole = chat.invoke(QUESTION)
    assert whole.text == chat_model(server, model).invoke(QUESTION).text
    assert whole.response_metadata["stop_reason"] == "end_turn"
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    usage = sum(chunks[1:], chunks[0]).usage_metadata
    assert usage is not None and whole.usage_metadata is not None
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"]

    async def ask() -> str:
        return "".join([chunk.text async for chunk in chat.astream(QUESTION)])

    assert run(ask()) == whole.text


def test_the_anthropic_package_binds_tools_and_forms_answers(server: Endpoint) -> None:
    chat = anthropic_model(server, temperature=0)
    bound = chat.bind_tools([book_table], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(ORDER)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    result = book_table.invoke(call)
    talk: list[BaseMessage] = [HumanMessage(ORDER), answer, result]
    assert chat.bind_tools([book_table]).invoke(talk).content is not None
    for method in ("function_calling", "json_schema"):
        formed = chat.with_structured_output(Booking, method=method)
        assert isinstance(formed.invoke(ORDER), Booking)
