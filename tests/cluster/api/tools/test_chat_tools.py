"""Tools and thoughts in chats: what the model is told, and what becomes of its answer."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.tools.conftest import NOW, WEATHER
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [WEATHER, NOW]
ARGUMENTS = '{"city": "Zürich 🌳", "days": 2}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'I look.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
Start = Callable[..., Serving]


def ask(serving: Serving, **body: Any) -> Any:
    whole = {"model": "tiny", "messages": HELLO} | body
    return serving.client().chat.completions.create(**whole)


def refused(serving: Serving, **body: Any) -> dict[str, Any]:
    whole = {"model": "tiny", "messages": HELLO} | body
    reply = httpx.post(f"{serving.url}/v1/chat/completions", json=whole, timeout=PATIENCE)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def streamed(serving: Serving, **body: Any) -> list[Any]:
    return list(ask(serving, stream=True, **body))


def prompt_of(serving: Serving) -> str:
    request = serving.schedulers[0].submitted[-1]
    return serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return what the deltas of a choice say together."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ends": []}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            said["content"] += choice.delta.content or ""
            thoughts = getattr(choice.delta, "reasoning_content", None)
            assert getattr(choice.delta, "reasoning", None) == thoughts
            said["reasoning"] += thoughts or ""
            for part in choice.delta.tool_calls or []:
                if part.id is not None:
                    assert (part.index, part.type) == (len(said["calls"]), "function")
                    said["calls"].append([part.id, part.function.name, ""])
                else:
                    assert part.function.name is None
                said["calls"][part.index][2] += part.function.arguments
            said["ends"] += [choice.finish_reason] if choice.finish_reason else []
    return said


def test_calls_come_with_ids_names_and_arguments(start: Start) -> None:
    serving = start("hermes", TWO)
    (choice,) = ask(serving, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "get_weather")
    assert first.function.arguments == ARGUMENTS
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id
    assert '"name": "get_weather"' in prompt_of(serving)


def test_a_stream_says_the_same_piece_by_piece(start: Start) -> None:
    serving = start("hermes", TWO)
    (choice,) = ask(serving, tools=TOOLS, extra_body={"request_id": "r"}).choices
    chunks = streamed(serving, tools=TOOLS, extra_body={"request_id": "r"})
    said = joined(chunks)
    calls = [[c.id, c.function.name, c.function.arguments] for c in choice.message.tool_calls]
    assert said == {"content": "I look.", "reasoning": "", "calls": calls, "ends": ["tool_calls"]}
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [part for c in chunks for part in c.choices[0].delta.tool_calls or []]
    assert len(pieces) > 10, "arguments come as they are written"


def test_the_id_of_a_call_follows_from_the_request(start: Start) -> None:
    serving = start("hermes", ONE)
    ids = [
        ask(serving, tools=TOOLS, extra_body={"request_id": name})
        .choices[0]
        .message.tool_calls[0]
        .id
        for name in ("r", "r", "s")
    ]
    assert ids[0] == ids[1] != ids[2]


def test_a_message_that_only_calls_has_no_content(start: Start) -> None:
    (choice,) = ask(start("hermes", ONE), tools=TOOLS).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
        ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        (
            "qwen3_xml",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich 🌳\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_each_family_has_its_own_way_to_call(start: Start, template: str, text: str) -> None:
    serving = start(template, text)
    (choice,) = ask(serving, tools=TOOLS).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert (len(call.id) == 9) is (template == "mistral")
    said = joined(streamed(serving, tools=TOOLS))
    assert [one[1:] for one in said["calls"]] == [["get_weather", ARGUMENTS]]
    assert said["ends"] == ["tool_calls"] == [choice.finish_reason]


@pytest.mark.parametrize(
    "text", ["no call", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "<tool_call>"]
)
def test_what_is_no_call_stays_content(start: Start, text: str) -> None:
    serving = start("hermes", text)
    (choice,) = ask(serving, tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"
    said = joined(streamed(serving, tools=TOOLS))
    assert said == {"content": text, "reasoning": "", "calls": [], "ends": ["stop"]}


def test_special_tokens_beside_those_of_calls_are_not_shown(start: Start) -> None:
    serving = start("mistral", "a<|im_start|>b [TOOL_CALLS] c")
    assert ask(serving, tools=TOOLS).choices[0].message.content == "ab [TOOL_CALLS] c"
    assert ask(serving).choices[0].message.content == "ab  c"


def test_without_tools_nothing_is_taken_apart(start: Start) -> None:
    serving = start("hermes", TWO)
    for tools in (
        {},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
    ):
        (choice,) = ask(serving, **tools).choices
        assert (choice.message.content, choice.finish_reason) == (TWO, "stop")
        assert "get_weather" not in prompt_of(serving)


def test_an_answer_that_is_cut_short_ends_so(start: Start) -> None:
    serving = start("hermes", TWO, ends=False)
    half = len(serving.router.tokenizer.encode(TWO[: TWO.index('", "days"')], False))
    (choice,) = ask(serving, tools=TOOLS, max_tokens=half).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert call.function.arguments == '{"city": "Zürich 🌳'


def test_a_stop_string_may_end_a_call(start: Start) -> None:
    serving = start("hermes", TWO)
    (choice,) = ask(serving, tools=TOOLS, stop=["</tool_call>"]).choices
    assert [c.function.arguments for c in choice.message.tool_calls] == [ARGUMENTS]
    said = joined(streamed(serving, tools=TOOLS, stop=['"days']))
    assert said["calls"][0][2] == '{"city": "Zürich 🌳", '


def test_one_call_at_most_where_they_may_not_be_parallel(start: Start) -> None:
    serving = start("hermes", TWO)
    (choice,) = ask(serving, tools=TOOLS, parallel_tool_calls=False).choices
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"]
    assert len(joined(streamed(serving, tools=TOOLS, parallel_tool_calls=False))["calls"]) == 1


def test_log_probabilities_and_tokens_are_of_all_that_was_generated(start: Start) -> None:
    serving = start("hermes", TWO)
    body = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
    (choice,) = ask(serving, **body).choices
    chunks = streamed(serving, **body)
    ids = [i for c in chunks for i in c.choices[0].token_ids]
    assert ids == choice.token_ids
    assert sum(len(c.choices[0].logprobs.content) for c in chunks) == len(ids)


def test_the_template_gets_calls_results_and_thoughts(start: Start) -> None:
    serving = start("thinking", "ok")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}
    ask(
        serving,
        tools=TOOLS,
        messages=[
            *HELLO,
            {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    )
    prompt = prompt_of(serving)
    assert "<|im_start|>assistant\n[hm]<call c1 f x><|im_end|>" in prompt
    assert "<|im_start|>tool\nrain<|im_end|>" in prompt


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], "messages.0.tool_calls"),
        ([{"role": "assistant", "content": "a", "tool_calls": {}}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages.0.tool_calls.0.function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
            "messages.0.tool_calls.0.function",
        ),
        ([{"role": "user", "content": "a", "tool_call_id": "c"}], "messages.0.tool_call_id"),
    ],
)
def test_wrong_turns_are_refused_by_name(start: Start, messages: Any, param: str) -> None:
    assert refused(start("hermes", "ok"), messages=messages)["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": {"a": 1}}, "tools", "must be a list"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type", "only tools of type function"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "must be an object"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
            "letters",
        ),
        ({"tools": [NOW, NOW]}, "tools", "two functions 'now'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
            "JSON schema of an object",
        ),
        ({"tools": [NOW] * 513}, "tools", "at most 512"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "must be none, auto"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no function 'x'",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "no effort 'high'"),
    ],
)
def test_what_cannot_be_served_is_refused(
    start: Start, body: dict[str, Any], param: str, reason: str
) -> None:
    error = refused(start("hermes", "ok"), **body)
    assert error["param"] == param
    assert reason in error["message"]


def test_tools_that_the_model_would_not_be_told_of_are_refused(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(FakeScheduler())
    error = refused(serving, tools=TOOLS)
    assert error["param"] == "tools"
    assert "does not tell it of tools" in error["message"]


def test_a_parser_may_be_named_or_forbidden(start: Start) -> None:
    error = refused(start("hermes", ONE, tool_call_parser="none"), tools=TOOLS)
    assert "set tool_call_parser" in error["message"]
    serving = start("hermes", '[TOOL_CALLS]now{"a": 1}', tool_call_parser="mistral")
    (choice,) = ask(serving, tools=TOOLS).choices
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'


THINKS = "<think>\nhm, 🌳\n</think>\n\nYes."


def test_thoughts_are_told_apart(start: Start) -> None:
    serving = start("thinking", THINKS)
    (choice,) = ask(serving).choices
    assert choice.message.content == "Yes."
    assert choice.message.reasoning_content == choice.message.reasoning == "hm, 🌳"
    said = joined(streamed(serving))
    assert said == {"content": "Yes.", "reasoning": "hm, 🌳", "calls": [], "ends": ["stop"]}


def test_thoughts_that_the_prompt_has_opened_need_no_beginning(start: Start) -> None:
    serving = start("opened", "hm\n</think>\n\nYes.")
    (choice,) = ask(serving).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Yes.")
    assert joined(streamed(serving))["reasoning"] == "hm"


def test_thoughts_are_left_out_on_demand(start: Start) -> None:
    serving = start("thinking", THINKS)
    for chunks in (streamed(serving, extra_body={"include_reasoning": False}),):
        assert joined(chunks) == {"content": "Yes.", "reasoning": "", "calls": [], "ends": ["stop"]}


def test_a_parser_of_thoughts_may_be_named_or_forbidden(start: Start) -> None:
    assert (
        ask(start("thinking", THINKS, reasoning_parser="none")).choices[0].message.content == THINKS
    )
    serving = start("hermes", "hm</think>Yes.", reasoning_parser="deepseek_r1")
    (choice,) = ask(serving).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("template", "body", "expected"),
    [
        ("thinking", {"reasoning_effort": "none"}, "</think>\n\n"),
        ("thinking", {"reasoning_effort": "medium"}, "assistant\n"),
        (
            "thinking",
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "</think>\n\n",
        ),
        ("effort", {"reasoning_effort": "high"}, "assistant\nhigh"),
        (
            "effort",
            {
                "reasoning_effort": "high",
                "extra_body": {"chat_template_kwargs": {"reasoning_effort": "x"}},
            },
            "assistant\nx",
        ),
        ("hermes", {"reasoning_effort": "none"}, "assistant\n"),
    ],
)
def test_the_template_is_told_how_hard_to_think(
    start: Start, template: str, body: dict[str, Any], expected: str
) -> None:
    serving = start(template, "ok")
    ask(serving, **body)
    assert prompt_of(serving).endswith(expected)


def test_an_answer_is_never_half_a_character(start: Start) -> None:
    serving = start("hermes", json.dumps({"a": "🌳" * 20}, ensure_ascii=False) + "<tool_")
    chunks = streamed(serving, tools=TOOLS)
    assert "�" not in joined(chunks)["content"]


def test_each_choice_is_taken_apart_for_itself(start: Start) -> None:
    serving = start("hermes", TWO)
    chunks = streamed(serving, tools=TOOLS, n=2)
    first, second = joined(chunks, 0), joined(chunks, 1)
    assert [c[1:] for c in first["calls"]] == [c[1:] for c in second["calls"]]
    assert {c[0] for c in first["calls"]}.isdisjoint(c[0] for c in second["calls"])


def test_tools_count_where_a_conversation_is_tokenized(start: Start) -> None:
    serving = start("hermes", "ok")
    ask(serving, tools=TOOLS)
    told = {"messages": HELLO, "tools": TOOLS}
    reply = httpx.post(f"{serving.url}/tokenize", json=told, timeout=PATIENCE).json()
    assert tuple(reply["tokens"]) == serving.schedulers[0].submitted[-1].token_ids
    wrong = {"prompt": "a", "tools": TOOLS}
    reply = httpx.post(f"{serving.url}/tokenize", json=wrong, timeout=PATIENCE)
    assert reply.status_code == 400


def test_a_template_that_takes_no_notice_of_tools_makes_the_same_tokens_with_them(
    start: Start,
) -> None:
    serving = start("effort", "ok")
    assert (
        httpx.post(
            f"{serving.url}/v1/chat/completions",
            json={"model": "tiny", "messages": HELLO, "tools": TOOLS},
            timeout=PATIENCE,
        ).status_code
        == 400
    )
    replies = [
        httpx.post(f"{serving.url}/tokenize", json={"messages": HELLO, **tools}, timeout=PATIENCE)
        for tools in ({}, {"tools": TOOLS})
    ]
    assert replies[0].json()["tokens"] == replies[1].json()["tokens"] != []


def test_the_client_itself_refuses_nothing_of_it(start: Start) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(start("hermes", "ok"), tools=[{"type": "function", "function": {"name": ""}}])
