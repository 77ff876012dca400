"""Calls that the demo model is made to write: always valid, and the same tokens in any company."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cluster.request import BASE, Request
from cluster.router.parser.call_grammar import CallSyntax, possible_calls, required_calls
from cluster.router.parser.families import MessageFormat, MessageParser
from cluster.router.tokenizer import Tokenizer
from deploy.local_engine import LocalEngine
from tests.end_to_end.engines import make_engine
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from worker.protocol import SamplingParams

pytestmark = pytest.mark.model

EOS = 2
FUNCTIONS: dict[str, dict[str, Any]] = {
    "book_table": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "people": {"type": "integer", "minimum": 1, "maximum": 20},
            "place": {"enum": ["inside", "outside"]},
            "wishes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["people", "place"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
FAMILIES = ("hermes", "llama3_json", "mistral", "qwen3_xml")


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    made = make_engine(1, "bfloat16")
    yield made
    made.close()


def requests(tokenizer: Tokenizer, adapters: tuple[str, ...]) -> list[tuple[str, Request]]:
    """Return (family, request) for each family, adapter and way of drawing."""
    prompt = tokenizer.encode("<|im_start|>user\nBook a table for two.<|im_end|>\n", False)
    made = []
    for family in FAMILIES:
        syntax = CallSyntax(family, "none", {})
        for adapter in adapters:
            for temperature in (0.0, 1.0):
                number = len(made)
                made.append(
                    (
                        family,
                        Request(
                            f"r{number}",
                            adapter,
                            prompt,
                            SamplingParams(
                                temperature=temperature,
                                seed=number,
                                grammar=required_calls(syntax, FUNCTIONS, is_parallel=False),
                            ),
                            400,
                            (EOS,),
                        ),
                    )
                )
    return made


def test_required_calls_are_valid_in_every_syntax(engine: LocalEngine) -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    asked = requests(tokenizer, (BASE, engine.add_adapter(adapter_dirs()["pirate"])))
    alone = [engine.generate([request])[0] for _, request in asked]
    num_whole = 0
    for (family, request), answer in zip(asked, alone, strict=True):
        assert answer.error is None, (family, answer.error)
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        message = MessageParser(MessageFormat(family, FUNCTIONS)).feed(text, ends=True)
        (call,) = message.tool_calls
        assert message.content == ""
        if answer.token_ids[-1] == EOS:
            num_whole += 1
            jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name or ""])
        else:  # a text without a limit may go on
            assert len(answer.token_ids) == request.max_tokens
    assert num_whole >= len(asked) // 2
    together = engine.generate([request for _, request in asked])
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_a_strict_function_leaves_free_text_as_it_is(engine: LocalEngine) -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    prompt = tokenizer.encode("The capital of France is", False)
    grammar = possible_calls(CallSyntax("hermes", "none", {}), FUNCTIONS, is_parallel=True)
    free, strict = (
        engine.generate(
            [Request(name, BASE, prompt, SamplingParams(seed=0, grammar=form), 24, (EOS,))]
        )[0]
        for name, form in (("free", ""), ("strict", grammar))
    )
    assert strict.token_ids == free.token_ids
