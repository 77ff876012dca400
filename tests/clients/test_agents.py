"""openai-agents and Pydantic AI against a served model: a run with tools and a typed result."""

from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponses
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS
from tests.patience import PATIENCE

QUESTION = "Tell me the capital of France."
ORDER = "Book a table for two, outside, please."


class Booking(BaseModel):
    """A table that is booked."""

    people: Literal[1, 2, 3, 4]
    place: Literal["inside", "outside"]


def agents_model(server: Endpoint, kind: Any, model: str) -> Any:
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )
    return kind(model=model, openai_client=client)


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_openai_agents_call_a_tool_and_go_on_with_its_result(
    server: Endpoint, kind: Any, model: str, run: Callable[..., Any]
) -> None:
    booked: list[str] = []

    # A model this small would call it again and again: after one call it is not offered.
    @function_tool(is_enabled=lambda _context, _agent: not booked)
    def book_table(people: int, place: Literal["inside", "outside"]) -> str:
        """Book a table."""
        booked.append(f"A table for {people} is booked {place}.")
        return booked[0]

    agent = Agent(
        name="host",
        instructions="You book tables.",
        model=agents_model(server, kind, model),
        model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required"),
        tools=[book_table],
    )
    result = run(Runner.run(agent, ORDER))
    (output,) = (one.output for one in result.new_items if one.type == "tool_call_output_item")
    assert [output] == booked
    assert result.final_output


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_openai_agents_stream_text_and_make_typed_results(
    server: Endpoint, kind: Any, run: Callable[..., Any]
) -> None:
    settings = ModelSettings(temperature=0, max_tokens=60)
    model = agents_model(server, kind, "smollm2")
    teller = Agent(name="teller", model=model, model_settings=settings)

    async def stream() -> tuple[str, str]:
        running = Runner.run_streamed(teller, QUESTION)
        parts = []
        async for event in running.stream_events():
            if event.type == "raw_response_event" and event.data.type.endswith("text.delta"):
                parts.append(event.data.delta)
        return "".join(parts), running.final_output

    streamed, whole = run(stream())
    assert streamed == whole != ""
    booker = Agent(name="booker", model=model, model_settings=settings, output_type=Booking)
    assert isinstance(run(Runner.run(booker, ORDER)).final_output, Booking)


def pydantic_model(server: Endpoint, kind: str, model: str) -> Any:
    if kind == "messages":
        return AnthropicModel(
            model, provider=AnthropicProvider(base_url=server.url, api_key="none")
        )
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    made = OpenAIChatModel if kind == "chats" else PydanticResponses
    return made(model, provider=provider)


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("kind", ["chats", "responses", "messages"])
def test_pydantic_ai_answers_streams_and_makes_typed_results(
    server: Endpoint, kind: str, model: str, run: Callable[..., Any]
) -> None:
    settings: Any = {"temperature": 0.0, "max_tokens": 60}
    served = pydantic_model(server, kind, model)
    teller = PydanticAgent(served, model_settings=settings)
    whole = run(teller.run(QUESTION)).output
    assert whole

    async def stream() -> str:
        async with teller.run_stream(QUESTION) as running:
            return "".join([text async for text in running.stream_text(delta=True)])

    assert run(stream()) == whole
    by_call = PydanticAgent(served, output_type=Booking, model_settings=settings, retries=0)
    assert isinstance(run(by_call.run(ORDER)).output, Booking)
    if kind == "messages":
        return  # by a form only with models that it knows by name
    by_form = PydanticAgent(
        served, output_type=NativeOutput(Booking), model_settings=settings, retries=0
    )
    assert isinstance(run(by_form.run(ORDER)).output, Booking)
