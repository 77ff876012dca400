"""Tools as the openai package uses them, against a served model that its template tells of none."""

import json
from typing import Any

import openai
import pytest

from tests.end_to_end.server import MODELS, Server

pytestmark = [pytest.mark.model, pytest.mark.ray]

MESSAGES: Any = [{"role": "user", "content": "Book a table for two, outside, please."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "book_table",
            "description": "Books a table.",
            "parameters": {
                "type": "object",
                "properties": {
                    "people": {"type": "integer", "minimum": 1, "maximum": 20},
                    "place": {"enum": ["inside", "outside"]},
                },
                "required": ["people", "place"],
                "additionalProperties": False,
            },
        },
    }
]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "book_table"}}]
)
def test_a_call_that_must_be_made_is_valid_for_the_base_model_and_adapters(
    server: Server, choice: Any
) -> None:
    for model in MODELS[:2]:
        asked: Any = {
            "model": model,
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "temperature": 0,
            "extra_body": {"request_id": "tools"},
        }
        whole = client_of(server).chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert 1 <= arguments["people"] <= 20
        assert arguments["place"] in ("inside", "outside")
        chunks = list(client_of(server).chat.completions.create(**asked, stream=True))
        parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or []]
        assert [parts[0].id, parts[0].function.name] == [call.id, "book_table"]
        said = "".join(part.function.arguments for part in parts)
        assert said == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_result_of_a_call_goes_back_and_the_model_answers_in_words(server: Server) -> None:
    call = {"name": "book_table", "arguments": '{"people": 2, "place": "outside"}'}
    talk: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "It is booked."},
    ]
    answer = client_of(server).chat.completions.create(
        model="smollm2", messages=talk, max_tokens=8, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_tools_that_the_template_would_leave_out_are_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="does not tell it of tools"):
        client_of(server).chat.completions.create(model="smollm2", messages=MESSAGES, tools=TOOLS)
