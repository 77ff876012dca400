"""The Messages API of a served model: real processes, the real anthropic client, two ranks."""

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.end_to_end.asking import wait_for
from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.server import MODELS, Server
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]
SETTINGS: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the client knows it no more, the server does


@pytest.mark.parametrize("model", MODELS[:3])
def test_messages_are_the_answers_of_chats_streamed_or_not(server: Server, model: str) -> None:
    turns: Any = [{"role": "user", "content": QUESTIONS[0]}]
    ask: Any = {"model": model, "max_tokens": 24, "messages": turns, **GREEDY}
    with openai.OpenAI(base_url=f"{server.url}/v1", **SETTINGS) as chats:
        chat = chats.chat.completions.create(**ask)
    with Anthropic(base_url=server.url, **SETTINGS) as client:
        whole: Any = client.messages.create(**ask)
        assert whole.content[0].text == chat.choices[0].message.content
        assert whole.model == model
        assert chat.usage is not None
        usage = whole.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
        assert usage.output_tokens == chat.usage.completion_tokens
        count = client.messages.count_tokens(model=model, messages=turns)
        assert count.input_tokens == chat.usage.prompt_tokens
        with client.messages.stream(**ask) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            last = stream.get_final_message()
        assert (last.stop_reason, last.usage.output_tokens) == (
            whole.stop_reason,
            usage.output_tokens,
        )


def test_an_adapter_may_be_named_behind_the_base_model(server: Server) -> None:
    turns: Any = [{"role": "user", "content": QUESTIONS[1]}]
    ask: Any = {"max_tokens": 16, "messages": turns, **GREEDY}
    with Anthropic(base_url=server.url, **SETTINGS) as client:
        one: Any = client.messages.create(model=MODELS[1], **ask)
        other: Any = client.messages.create(model=f"smollm2:{MODELS[1]}", **ask)
    assert other.content == one.content


def test_stop_sequences_prefilled_answers_and_forms(server: Server) -> None:
    ask: Any = {"model": "smollm2", **GREEDY}
    told = "Count from one to nine, in words, with commas."
    turns: Any = [
        {"role": "user", "content": told},
        {"role": "assistant", "content": "one, two, three,"},
    ]
    with Anthropic(base_url=server.url, **SETTINGS) as client:
        cut = client.messages.create(
            system=[{"type": "text", "text": "Be brief."}],
            messages=turns,
            stop_sequences=[","],
            max_tokens=40,
            **ask,
        )
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", ",")
        first: Any = cut.content[0]
        assert "," not in first.text
        schema = {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 20}},
            "required": ["town"],
            "additionalProperties": False,
        }
        formed: Any = client.messages.create(
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            output_config={"format": {"type": "json_schema", "schema": schema}},
            max_tokens=60,
            **ask,
        )
    assert set(json.loads(formed.content[0].text)) == {"town"}
    assert formed.stop_reason == "end_turn"


def test_a_tool_that_must_be_used_is_called_as_its_schema_says(server: Server) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"people": {"type": "integer", "minimum": 1, "maximum": 20}},
        "required": ["people"],
        "additionalProperties": False,
    }
    ask: Any = {
        "model": MODELS[1],
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "Book a table for two."}],
        "tools": [{"name": "book", "input_schema": schema}],
        "tool_choice": {"type": "tool", "name": "book"},
        **GREEDY,
    }
    with Anthropic(base_url=server.url, **SETTINGS) as client:
        whole: Any = client.messages.create(**ask)
        (call,) = whole.content
        assert (call.type, call.name, whole.stop_reason) == ("tool_use", "book", "tool_use")
        assert 1 <= call.input["people"] <= 20
        with client.messages.stream(**ask) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.type, streamed.input) == ("tool_use", call.input)


def test_errors_are_those_that_the_client_knows(server: Server) -> None:
    turns: Any = [{"role": "user", "content": "x"}]
    with Anthropic(base_url=server.url, **SETTINGS) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
            client.messages.create(model="none", max_tokens=1, messages=turns)
        assert missing.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="context length"):
            client.messages.create(model="smollm2", max_tokens=10**6, messages=turns)


def test_the_async_client_streams_many_at_once(server: Server) -> None:
    async def ask(client: AsyncAnthropic, model: str) -> str:
        turns: Any = [{"role": "user", "content": QUESTIONS[0]}]
        async with client.messages.stream(
            model=model, max_tokens=12, messages=turns, **GREEDY
        ) as stream:
            streamed = "".join([text async for text in stream.text_stream])
        whole: Any = await client.messages.create(
            model=model, max_tokens=12, messages=turns, **GREEDY
        )
        assert whole.content[0].text == streamed
        return streamed

    async def ask_all() -> list[str]:
        async with AsyncAnthropic(base_url=server.url, **SETTINGS) as client:
            return await asyncio.gather(*(ask(client, model) for model in [*MODELS, *MODELS]))

    answers = asyncio.run(ask_all())
    assert answers[: len(MODELS)] == answers[len(MODELS) :]


def test_a_client_that_leaves_ends_its_message(server: Server) -> None:
    with (
        Anthropic(base_url=server.url, **SETTINGS) as client,
        client.messages.stream(
            model="smollm2",
            max_tokens=6000,
            messages=[{"role": "user", "content": "Count:"}],
            extra_body={"ignore_eos": True, "seed": 1},
        ) as stream,
    ):
        assert next(iter(stream.text_stream))
    wait_for(lambda: server.metric("topwork_requests_running") == 0)
