"""Tools and thoughts in Anthropic's Messages API."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cluster.api.tools.conftest import WEATHER
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

SCHEMA = WEATHER["function"]["parameters"]
TOOLS = [{"name": "get_weather", "description": "the weather", "input_schema": SCHEMA}]
CALL = '{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}'
Start = Callable[..., Serving]


def post(serving: Serving, path: str = "", **body: Any) -> dict[str, Any]:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    if not path:
        ask["max_tokens"] = 500
    reply = httpx.post(f"{serving.url}/v1/messages{path}", json=ask | body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def prompt_of(serving: Serving) -> str:
    request = serving.schedulers[0].submitted[-1]
    return serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)


def test_a_call_is_a_block_and_its_result_goes_back(start: Start) -> None:
    serving = start("hermes", f"I look. <tool_call>{CALL}</tool_call>")
    answer = post(serving, tools=TOOLS)
    assert "get_weather" in prompt_of(serving)
    text, call = answer["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"]) == ("tool_use", "get_weather")
    assert call["input"] == {"city": "Bern", "days": 2}
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun"}
    talk = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    post(serving, messages=talk, tools=TOOLS)
    assert prompt_of(serving).endswith(
        f"<|im_start|>assistant\nI look.<call {call['id']} get_weather Bern><|im_end|>\n"
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_counted_is_the_prompt_with_its_tools(start: Start) -> None:
    serving = start("hermes", "x")
    usage = post(serving, tools=TOOLS)["usage"]
    assert post(serving, "/count_tokens", tools=TOOLS) == {"input_tokens": usage["input_tokens"]}
    assert post(serving, "/count_tokens")["input_tokens"] < usage["input_tokens"]


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "f"}]
)
def test_a_call_that_must_be_made_is_written_by_grammar(
    start: Start, choice: dict[str, Any]
) -> None:
    serving = start("hermes", "x")
    tools = [TOOLS[0] | {"name": "f"}]
    post(serving, tools=tools, tool_choice=choice)
    assert "get_weather" not in serving.schedulers[0].submitted[-1].sampling.grammar
    assert serving.schedulers[0].submitted[-1].sampling.grammar
    post(serving, tools=tools, tool_choice={"type": "none"})
    assert not serving.schedulers[0].submitted[-1].sampling.grammar


def test_thoughts_are_blocks_where_they_are_asked_for(start: Start) -> None:
    serving = start("thinking", "<think>hm</think>yes")
    assert post(serving)["content"] == [{"type": "text", "text": "yes"}]
    asked = post(serving, thinking={"type": "adaptive"})["content"]
    assert asked == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": asked},
        {"role": "user", "content": "b"},
    ]
    post(serving, messages=talk)
    assert "[hm]yes" in prompt_of(serving)


def test_calls_without_their_results_cannot_be_gone_on_with(start: Start) -> None:
    serving = start("hermes", "x")
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    body = {"model": "tiny", "max_tokens": 5, "messages": talk}
    reply = httpx.post(f"{serving.url}/v1/messages", json=body, timeout=PATIENCE)
    assert reply.status_code == 400
    assert "their results must follow" in reply.json()["error"]["message"]
