"""Calls that are written by grammar: what the ranks are told to follow, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.api.tools.conftest import NOW, WEATHER
from tests.cluster.api.tools.test_chat_tools import TOOLS, ask, refused
from tests.cluster.conftest import EOS, Serving
from worker.grammar import GrammarVocabulary

STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "now"}}
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x", "days": 2}}\n</tool_call>'
WRONG = ONE.replace('"days": 2', '"days": "two"')
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def start(serve_once: Callable[..., Serving], model_of: Callable[[str], Path]) -> Any:
    """Return a function that serves a model, once for each template."""
    made: dict[str, Serving] = {}

    def serve(template: str) -> Serving:
        if template not in made:
            path = model_of(template)
            size = Tokenizer.load(path).num_tokens
            made[template] = serve_once(
                FakeScheduler(lambda _: Script((5, EOS)), vocab_size=size),
                model_dir=str(path),
                vocab_size=size,
                context_length=4096,
            )
        return made[template]

    return serve


def grammar_of(serving: Serving) -> str:
    return serving.schedulers[0].submitted[-1].sampling.grammar


def allows(serving: Serving, text: str) -> bool:
    """Tell whether a text is a whole answer of the grammar that was asked for last."""
    config = serving.router.config
    vocabulary = GrammarVocabulary(Path(config.model_dir), config.vocab_size, (EOS,))
    state = vocabulary.matcher(grammar_of(serving))
    assert not state.is_error(), state.get_error()
    tokens = list(serving.router.tokenizer.encode(text, False))
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def test_a_required_call_is_of_any_function(start: Any) -> None:
    serving = start("hermes")
    ask(serving, tools=TOOLS, tool_choice="required")
    asked = [ONE, OTHER, ONE + "\n" + OTHER, WRONG, "hello", ""]
    assert [allows(serving, text) for text in asked] == [True, True, True, False, False, False]


def test_a_named_function_is_called_once(start: Any) -> None:
    serving = start("hermes")
    ask(serving, tools=TOOLS, tool_choice=NAMED)
    assert [allows(serving, text) for text in (OTHER, ONE, OTHER + "\n" + OTHER)] == [
        True,
        False,
        False,
    ]


def test_calls_that_may_not_be_parallel_are_one(start: Any) -> None:
    serving = start("hermes")
    ask(serving, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [allows(serving, text) for text in (ONE, ONE + "\n" + OTHER)] == [True, False]


def test_only_allowed_functions_are_called_and_the_model_is_told_of_all(start: Any) -> None:
    serving = start("hermes")
    allowed = {"mode": "required", "tools": [NAMED]}
    ask(serving, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [allows(serving, text) for text in (OTHER, ONE)] == [True, False]
    request = serving.schedulers[0].submitted[-1]
    prompt = serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert "get_weather" in prompt


def test_a_strict_function_is_called_as_it_says_or_not_at_all(start: Any) -> None:
    serving = start("hermes")
    ask(serving, tools=[STRICT, NOW])
    free = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    asked = ["hello <", f"so {ONE} ok", free, WRONG]
    assert [allows(serving, text) for text in asked] == [True, True, True, False]
    ask(serving, tools=TOOLS)
    assert grammar_of(serving) == ""


def test_thoughts_may_go_before(start: Any) -> None:
    serving = start("thinking")
    ask(serving, tools=TOOLS, tool_choice="required")
    assert allows(serving, f"<think>hm</think>\n\n{ONE}")
    ask(serving, tools=TOOLS, tool_choice="required", reasoning_effort="none")
    assert not allows(serving, f"<think>hm</think>\n\n{ONE}")
    assert allows(serving, ONE)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_be_made_are_json_already(start: Any, choice: Any) -> None:
    serving = start("hermes")
    ask(serving, tools=TOOLS, tool_choice=choice)
    expected = grammar_of(serving)
    ask(serving, tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"})
    assert grammar_of(serving) == expected != ""


def test_a_form_begins_behind_the_thoughts_that_the_prompt_opens(start: Any) -> None:
    serving = start("opened")
    ask(serving, response_format={"type": "json_object"})
    assert [allows(serving, text) for text in ("hm</think>\n\n{}", "{}")] == [True, False]


def test_a_model_that_knows_no_tools_is_made_to_call(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler(lambda _: Script((5, EOS))))
    ask(serving, tools=TOOLS, tool_choice="required")
    assert [allows(serving, text) for text in (ONE, WRONG, "hello")] == [True, False, False]


@pytest.mark.parametrize("template", ["hermes", "mistral", "llama3_json", "qwen3_xml", "opened"])
@pytest.mark.parametrize("choice", ["required", NAMED, "auto"])
def test_every_family_has_a_grammar(start: Any, template: str, choice: Any) -> None:
    if (template, choice) == ("opened", "auto"):
        return  # it knows no tools
    serving = start(template)
    ask(serving, tools=[STRICT, NOW], tool_choice=choice)
    assert grammar_of(serving)


def test_a_schema_that_cannot_be_followed_is_refused(start: Any) -> None:
    broken = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "("}},
            },
        },
    }
    error = refused(start("hermes"), tools=[broken], tool_choice="required")
    assert error["param"] == "tools"
    error = refused(start("qwen3_xml"), tools=[broken], tool_choice="required")
    assert "cannot be followed between tags" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"ignore_eos": True}, "tool_choice": "required"}, "ignore_eos"),
        ({"extra_body": {"min_tokens": 4}, "tool_choice": "required"}, "min_tokens"),
    ],
)
def test_what_clashes_with_tools_is_refused(start: Any, body: dict[str, Any], param: str) -> None:
    plain = {key: value for key, value in body.items() if key != "extra_body"}
    error = refused(start("hermes"), tools=TOOLS, **plain, **body.get("extra_body", {}))
    assert error["param"] == param
