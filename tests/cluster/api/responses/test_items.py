"""Items of a Responses call as the turns of a chat template."""

from typing import Any

import jinja2
import pytest

from cluster.api.responses.items import for_template, turns_of
from cluster.errors import InvalidRequest


def call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id}


def output(text: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_function_calls_are_the_assistants_and_their_outputs_a_tools() -> None:
    items: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "let me see"},
        call("weather", '{"town": "Ghent"}'),
        call("time", "{}", "c2"),
        output("rain"),
        output([{"type": "input_text", "text": "noon"}], "c2"),
        call("weather", "not JSON", "c3"),
    ]
    turns = for_template(turns_of(items))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant"]
    assert turns[1]["content"] == "let me see"
    assert turns[1]["tool_calls"] == [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"town": "Ghent"}},
        },
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    assert turns[2] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    assert turns[3] == {"role": "tool", "tool_call_id": "c2", "content": "noon"}
    assert turns[4]["content"] == ""
    assert turns[4]["tool_calls"][0]["function"]["arguments"] == "not JSON"


def test_a_template_of_a_model_with_tools_renders_them() -> None:
    template = jinja2.Environment().from_string(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
        "{% endfor %};{% endfor %}"
    )
    turns = for_template(turns_of([call("f", '{"a": [1, "b"]}'), output("x")]))
    assert template.render(messages=turns) == 'assistant:<f {"a": [1, "b"]}>;tool:x;'


@pytest.mark.parametrize(
    "arguments",
    ["[" * 5000, '{"a":' * 5000, "1" * 5000, '{"a": ' + "1" * 5000 + "}", "[1]", '"a"', "null", ""],
    ids=range(8),
)
def test_arguments_that_are_no_object_stay_what_the_model_said(arguments: str) -> None:
    (turn,) = for_template(turns_of([call("f", arguments)]))
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_is_kept_of_a_call_is_its_text() -> None:
    turns = turns_of([call("f", '{"a": 1}')])
    for_template(turns)
    assert turns[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_arguments_count_together() -> None:
    turns = turns_of([call("f", "[" + "0," * 200_000 + "0]", str(n)) for n in range(2)])
    with pytest.raises(InvalidRequest, match="more than 262144 values"):
        for_template(turns)


def test_parts_are_joined_and_a_refusal_is_a_text_too() -> None:
    parts = [
        {"type": "output_text", "text": "a", "annotations": []},
        {"type": "refusal", "refusal": "no"},
    ]
    (turn,) = turns_of([{"role": "assistant", "content": parts}])
    assert turn == {"role": "assistant", "content": "a\nno"}
