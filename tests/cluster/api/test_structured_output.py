"""Every spelling of a form becomes a grammar of just that form; what is none is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import EOS
from tests.patience import PATIENCE
from worker.grammar import GrammarVocabulary

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
LONG_TAG = {"begin": "<f>", "schema": {"title": "x" * 60_000}, "end": "</f>"}
JSON, NO_JSON = '{"name":"x"}', '{"name":1}'


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Any]) -> Any:
    return serve_once(FakeScheduler(lambda _: Script((1, 2, EOS))))


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path, serving: Any) -> GrammarVocabulary:
    return GrammarVocabulary(model_dir, serving.router.config.vocab_size, (EOS,))


def follows(vocabulary: GrammarVocabulary, grammar: str, text: str) -> bool:
    """Tell whether a text is a whole answer of a grammar."""
    matcher = vocabulary.matcher(grammar)
    tokens = vocabulary.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def ask(serving: Any, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "prompt": "hello"} | body
    return httpx.post(f"{serving.url}/v1/completions", json=whole, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("body", "fitting", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":[1,null]}', "[1]"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JSON,
            NO_JSON,
        ),
        ({"response_format": TAG | {"type": "structural_tag"}}, f"so <f>{JSON}</f>", "so <f>1"),
        ({"structured_outputs": {"json": SCHEMA}}, JSON, NO_JSON),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON, NO_JSON),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "aba", "abc"),
        ({"structured_outputs": {"regex": "^[ab]{3}$"}}, "aba", "^aba$"),
        ({"structured_outputs": {"regex": "[ab]\\$"}}, "a$", "a"),
        ({"structured_outputs": {"choice": ["yes", 'say "no"', "naïve"]}}, 'say "no"', "no"),
        ({"structured_outputs": {"choice": ["yes", 'say "no"', "naïve"]}}, "naïve", "naive"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b" "c"'}}, "bc", "b"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" "c"'}}, "bc", "b"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, f"<f>{JSON}</f>", "<f>1"),
        ({"guided_json": SCHEMA}, JSON, NO_JSON),
        (
            {"guided_json": {"properties": {"foo": {"type": "null"}}}},
            '{"foo":null}',
            '{"\\u0066oo":1}',
        ),
        ({"guided_regex": "[0-9]+"}, "12", "a"),
        ({"guided_choice": ["a", "b"]}, "b", "c"),
        ({"guided_grammar": 'start: "x"+'}, "xxx", "y"),
        ({"guided_grammar": '\n  start :"x"+'}, "xxx", "y"),
        ({"json_schema": json.dumps(SCHEMA)}, JSON, NO_JSON),
        ({"regex": "x|y"}, "y", "z"),
        ({"ebnf": 'root ::= "x"'}, "x", "y"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_form_reaches_the_scheduler_as_its_grammar(
    serving: Any, vocabulary: GrammarVocabulary, body: dict[str, Any], fitting: str, other: str
) -> None:
    reply = ask(serving, **body)
    assert reply.status_code == 200, reply.text
    grammar = serving.schedulers[0].submitted[-1].sampling.grammar
    assert follows(vocabulary, grammar, fitting)
    assert not follows(vocabulary, grammar, other)


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}],
)
def test_a_call_without_a_form_has_no_grammar(serving: Any, body: dict[str, Any]) -> None:
    assert ask(serving, **body).status_code == 200
    assert serving.schedulers[0].submitted[-1].sampling.grammar == ""


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"guided_json": {"type": "bogus"}}, "guided_json", "bogus"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"guided_json": "{"}, "guided_json", "Expecting"),
        ({"ebnf": "root ::= other"}, "ebnf", "'other' not found"),
        ({"guided_grammar": ""}, "guided_grammar", "No 'root' rule"),
        ({"guided_json": 7}, "guided_json", "a JSON schema is an object"),
        ({"guided_json": {"type": "object", "pattern": "x" * 200_000}}, "guided_json", "limit"),
        ({"guided_json": {"$ref": "http://elsewhere/schema"}}, "guided_json", ""),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", ""),
        ({"guided_json": {"const": -(2**63)}}, "guided_json", "cannot be followed"),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "x-guidance"),
        ({"guided_json": {"type": "string", "pattern": "[]"}}, "guided_json", "empty class"),
        (
            {"guided_grammar": 'start: %json {"const": -9223372036854775808}'},
            "guided_grammar",
            "cannot be compiled",
        ),
        ({"guided_regex": "(a"}, "guided_regex", "invalid regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", ""),
        ({"guided_choice": []}, "guided_choice", "1 to 4096 choices, not 0"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "must not be empty"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice", "1 to 4096 choices, not 5000"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", ""),
        ({"guided_grammar": "root ::= " + "(" * 10_000}, "guided_grammar", ""),
        ({"guided_grammar": "root ::= " + '"a" ' * 20_000}, "guided_grammar", "of GBNF are over"),
        ({"guided_grammar": "\n" * 120_000 + "x"}, "guided_grammar", "of GBNF are over"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml", "not permitted"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag", ""),
        (
            {"response_format": TAG | {"type": "structural_tag", "triggers": ["<g"]}},
            "response_format",
            "no trigger is the beginning of '<f>'",
        ),
        (
            {"response_format": TAG | {"type": "structural_tag", "structures": [LONG_TAG] * 3}},
            "response_format",
            "over the limit",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one form only"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends when its form does"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "ends when its form does"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    serving: Any, body: dict[str, Any], param: str, reason: str
) -> None:
    num_submitted = len(serving.schedulers[0].submitted)
    reply = ask(serving, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert len(serving.schedulers[0].submitted) == num_submitted


@pytest.mark.parametrize("levels", [20, 150, 5000])
def test_a_deep_schema_is_served_or_refused(serving: Any, levels: int) -> None:
    text = '{"type":"array","items":' * levels + '{"type":"string"}' + "}" * levels
    content = '{"model":"tiny","prompt":"x","guided_json":' + text + "}"
    reply = httpx.post(f"{serving.url}/v1/completions", content=content, timeout=PATIENCE)
    assert reply.status_code in (200, 400), reply.text


def test_a_model_without_an_end_refuses_forms(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), eos_token_ids=())
    reply = ask(serving, guided_regex="a")
    assert reply.status_code == 400
    assert "no token that ends an answer" in reply.json()["error"]["message"]


class Person(BaseModel):
    """What openai's `parse` makes a schema of."""

    name: str
    age: int


def test_openais_parse_returns_what_the_form_is_of(
    serve: Callable[..., Any], saying: Callable[..., tuple[int, ...]]
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(saying('{"name":"Ann","age":7}'))))
    client: openai.OpenAI = serving.client()
    answer = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ann", age=7)
    assert serving.schedulers[0].submitted[0].sampling.grammar
