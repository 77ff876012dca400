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
from tests.end_to_end.engines import EngineMaker, companies
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from worker.protocol import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]  # `make test-engines`

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
PROMPT = f"<|im_start|>user\n{'Book a table for two. ' * 12}<|im_end|>\n"
FAMILIES = ("hermes", "llama3_json", "mistral", "qwen3_xml")


@pytest.fixture(scope="module")
def make() -> Iterator[EngineMaker]:
    with EngineMaker(1, "bfloat16") as maker:
        yield maker


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)


def requests(tokenizer: Tokenizer, engine: LocalEngine) -> list[tuple[str, Request]]:
    """Return (family, request) for each family, base and adapter, and way of drawing."""
    adapters = (BASE, engine.add_adapter(adapter_dirs()["pirate"]))
    prompt = tokenizer.encode(PROMPT, False)
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


@pytest.fixture(scope="module")
def alone(make: EngineMaker, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for _, one in requests(tokenizer, engine)]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.token_ids for answer in answers]


def test_required_calls_are_valid_in_every_syntax(
    make: EngineMaker, alone: list[list[int]], tokenizer: Tokenizer
) -> None:
    asked = requests(tokenizer, make())
    num_whole = 0
    for (family, request), token_ids in zip(asked, alone, strict=True):
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        message = MessageParser(MessageFormat(family, FUNCTIONS)).feed(text, ends=True)
        (call,) = message.tool_calls
        assert message.content == ""
        if token_ids[-1] == EOS:
            num_whole += 1
            jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name or ""])
        else:  # a text without a limit may go on
            assert len(token_ids) == request.max_tokens
    assert num_whole >= len(asked) // 2


@pytest.mark.parametrize("scheduler", companies(num_pages=10))
def test_company_chunks_and_preemption_change_no_token_of_a_call(
    make: EngineMaker, alone: list[list[int]], tokenizer: Tokenizer, scheduler: dict[str, Any]
) -> None:
    engine = make(**scheduler)
    answers = engine.generate([one for _, one in requests(tokenizer, engine)])
    assert [answer.token_ids for answer in answers] == alone
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.preemptions > 0


def test_a_strict_function_leaves_free_text_as_it_is(
    make: EngineMaker, tokenizer: Tokenizer
) -> None:
    engine = make()
    prompt = tokenizer.encode("The capital of France is", False)
    grammar = possible_calls(CallSyntax("hermes", "none", {}), FUNCTIONS, is_parallel=True)
    free, strict = (
        engine.generate(
            [Request(name, BASE, prompt, SamplingParams(seed=0, grammar=form), 24, (EOS,))]
        )[0]
        for name, form in (("free", ""), ("strict", grammar))
    )
    assert strict.token_ids == free.token_ids
