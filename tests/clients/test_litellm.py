"""LiteLLM against a served model, by the three providers under whose names people use it."""

import copy
import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest

from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS
from tests.patience import PATIENCE

QUESTION: Any = [{"role": "user", "content": "Tell me the capital of France."}]
ORDER: Any = [{"role": "user", "content": "Book a table for two, outside, please."}]
BOOKING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "people": {"type": "integer", "minimum": 1, "maximum": 20},
        "place": {"enum": ["inside", "outside"]},
    },
    "required": ["people", "place"],
    "additionalProperties": False,
}
PROVIDERS = ("openai", "hosted_vllm", "anthropic")
OF_OPENAI = PROVIDERS[:2]


def schema() -> dict[str, Any]:
    return copy.deepcopy(BOOKING)  # one provider takes additionalProperties out of what it is given


def tools() -> list[dict[str, Any]]:
    function = {"name": "book_table", "description": "Books a table.", "parameters": schema()}
    return [{"type": "function", "function": function}]


def asked(server: Endpoint, provider: str, model: str = "smollm2", **extra: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{model}",
        "api_base": server.url if provider == "anthropic" else f"{server.url}/v1",
        "api_key": "none",
        "timeout": PATIENCE,
        "num_retries": 0,
        **extra,
    }


def greedy(server: Endpoint, provider: str, model: str, messages: Any) -> dict[str, Any]:
    return asked(server, provider, model, messages=messages, temperature=0, max_tokens=60)


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_completions_streamed_or_not_say_the_same_by_every_provider(
    server: Endpoint, provider: str, model: str, run: Callable[..., Any]
) -> None:
    ask = greedy(server, provider, model, QUESTION)
    whole: Any = litellm.completion(**ask)
    first: Any = litellm.completion(**greedy(server, "openai", model, QUESTION))
    said = whole.choices[0].message.content
    assert said == first.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == first.usage.completion_tokens
    assert whole.usage.prompt_tokens == first.usage.prompt_tokens
    chunks: Any = list(litellm.completion(**ask, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said

    async def stream() -> str:
        parts: Any = await litellm.acompletion(**ask, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in parts if c.choices])

    assert run(stream()) == said


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_that_must_be_called_is_called_and_its_result_goes_back(
    server: Endpoint, provider: str
) -> None:
    ask = greedy(server, provider, "smollm2", ORDER) | {"tools": tools()}
    answer: Any = litellm.completion(
        **ask, tool_choice={"type": "function", "function": {"name": "book_table"}}
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "book_table"
    arguments = json.loads(call.function.arguments)
    assert 1 <= arguments["people"] <= 20
    assert arguments["place"] in ("inside", "outside")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is booked."}
    talk = [*ORDER, message.model_dump(exclude_none=True), result]
    after: Any = litellm.completion(**{**ask, "messages": talk})
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")
    chunks: Any = list(litellm.completion(**ask, tool_choice="required", stream=True))
    rebuilt: Any = litellm.stream_chunk_builder(chunks)
    streamed = rebuilt.choices[0].message.tool_calls
    assert {one.function.name for one in streamed} == {"book_table"}
    assert all(1 <= json.loads(one.function.arguments)["people"] <= 20 for one in streamed)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_form_is_kept(server: Endpoint, provider: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "booking", "schema": schema()}}
    ask = greedy(server, provider, "smollm2", ORDER)
    answer: Any = litellm.completion(**ask, response_format=form)
    assert set(json.loads(answer.choices[0].message.content)) == {"people", "place"}


@pytest.mark.parametrize("provider", OF_OPENAI)
def test_embeddings_are_the_same_sync_and_async(
    server: Endpoint, provider: str, run: Callable[..., Any]
) -> None:
    ask = asked(server, provider, input=["a sunny day", "rain all day"])
    vectors = [one["embedding"] for one in litellm.embedding(**ask).data]
    assert [len(vector) for vector in vectors] == [576, 576]
    again = run(litellm.aembedding(**ask))
    assert [one["embedding"] for one in again.data] == vectors


def test_texts_are_completed(server: Endpoint) -> None:
    ask = asked(server, "text-completion-openai", prompt="Once upon a", max_tokens=8, seed=3)
    whole: Any = litellm.text_completion(**ask)
    assert whole.choices[0].text
    parts: Any = litellm.text_completion(**ask, stream=True)
    assert "".join(part.choices[0].text or "" for part in parts) == whole.choices[0].text


def test_responses_say_what_chats_say(server: Endpoint) -> None:
    chat: Any = litellm.completion(**greedy(server, "openai", "smollm2", QUESTION))
    ask = asked(server, "openai", input=QUESTION[0]["content"], temperature=0)
    whole: Any = litellm.responses(**ask, max_output_tokens=60)
    assert whole.output_text == chat.choices[0].message.content
    events: Any = litellm.responses(**ask, max_output_tokens=60, stream=True)
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


@pytest.mark.parametrize("provider", PROVIDERS)
def test_mistakes_arrive_as_litellms_exceptions(server: Endpoint, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**greedy(server, provider, "nobody", QUESTION))
    with pytest.raises(litellm.BadRequestError, match="context length"):
        litellm.completion(**greedy(server, provider, "smollm2", QUESTION) | {"max_tokens": 10**6})
