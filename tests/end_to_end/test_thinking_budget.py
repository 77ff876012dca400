"""Thoughts with a budget over the real engine: closed behind it, and no other token changed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from cluster.request import BASE, Request
from cluster.router.parser.call_grammar import CallSyntax, behind_thoughts
from cluster.router.parser.families import MessageFormat, MessageParser
from cluster.router.tokenizer import Tokenizer
from deploy.local_engine import Answer, LocalEngine
from tests.end_to_end.engines import EngineMaker
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from tests.end_to_end.test_structured_output import run_ahead
from worker.protocol import SamplingParams, ThinkingBudget

pytestmark = pytest.mark.model

NUM_TOKENS = 16
EOS = 2
BUDGETS = (0, 5, 1000)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "count": {"type": "integer", "maximum": 99}},
    "required": ["sure", "count"],
    "additionalProperties": False,
}
SIZES = [pytest.param(2, id="tp2"), pytest.param(1, id="tp1", marks=pytest.mark.slow)]
OPENED = MessageFormat(reasoning="qwen3", begins_in_thought=True)


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param, "bfloat16") as maker:
        yield maker


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)


@pytest.fixture(scope="module")
def closing(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tag in the tokens of this model, to which it is a text like any other."""
    return tokenizer.encode("</think>", False)


def form() -> str:
    schema = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    return behind_thoughts(CallSyntax("hermes", "begun", {}), schema)


def free(engine: LocalEngine) -> list[Request]:
    """Return a request of the base model and one of an adapter, without a budget."""
    adapter = engine.add_adapter(adapter_dirs()["pirate"])
    drawn = (
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=1),
    )
    made = []
    for number, (name, sampling) in enumerate(zip((BASE, adapter), drawn, strict=True)):
        prompt = tuple(range(300 + 7 * number, 410 + 9 * number))
        made.append(Request(f"free{number}", name, prompt, sampling, NUM_TOKENS))
    return made


def budgeted(one: Request, budget: ThinkingBudget, **changes: Any) -> Request:
    sampling = msgspec.structs.replace(one.sampling, thinking=budget, **changes)
    name = f"{one.request_id}.{budget.num_tokens}.{len(changes)}"
    return msgspec.structs.replace(one, request_id=name, sampling=sampling)


def asked_of(engine: LocalEngine, closing: tuple[int, ...]) -> list[Request]:
    """Return each free request with each budget, and with a form behind the thought."""
    made = []
    for one in free(engine):
        for number in BUDGETS:
            budget = ThinkingBudget(number, "<think>", "</think>", closing, is_open=True)
            made.append(budgeted(one, budget))
        budget = ThinkingBudget(5, "<think>", "</think>", closing, is_open=True)
        formed = budgeted(one, budget, grammar=form())
        made.append(msgspec.structs.replace(formed, max_tokens=48, stop_token_ids=(EOS,)))
    return made


@pytest.fixture(scope="module")
def said(make: EngineMaker) -> list[list[int]]:
    engine = make()
    return [answer.token_ids for answer in engine.generate(free(engine))]


@pytest.fixture(scope="module")
def alone(make: EngineMaker, closing: tuple[int, ...]) -> list[list[int]]:
    """The tokens of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in asked_of(engine, closing)]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.token_ids for answer in answers]


def test_a_thought_ends_behind_its_budget_and_is_what_it_would_have_been(
    said: list[list[int]], alone: list[list[int]], closing: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    num_forms = len(BUDGETS) + 1
    for place, tokens in enumerate(alone):
        thought = said[place // num_forms]
        which = place % num_forms
        if which < len(BUDGETS):
            assert len(tokens) == NUM_TOKENS
            count = min(BUDGETS[which], NUM_TOKENS)
            assert tokens[:count] == thought[:count]
            rest = tokens[count : count + len(closing)]
            assert rest == list(closing)[: NUM_TOKENS - count]
        else:
            assert tokens[-1] == EOS
            parser = MessageParser(OPENED)
            message = parser.feed(tokenizer.decode(tokens[:-1], False), ends=True)
            jsonschema.validate(json.loads(message.content), SCHEMA)


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param({"token_budget": 80, "max_chunk": 64, "max_running": 5}, id="small chunks"),
        pytest.param({"num_pages": 4}, id="few pages"),
        pytest.param({"prefix_cache": False}, id="no prefix cache", marks=pytest.mark.slow),
    ],
)
def test_company_chunks_and_preemption_change_no_token(
    make: EngineMaker,
    closing: tuple[int, ...],
    said: list[list[int]],
    alone: list[list[int]],
    scheduler: dict[str, Any],
) -> None:
    engine = make(**scheduler)
    answers = engine.generate([*asked_of(engine, closing), *free(engine)])
    assert [answer.token_ids for answer in answers] == [*alone, *said]
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.preemptions > 0


def test_steps_that_are_planned_ahead_change_no_token(
    make: EngineMaker, closing: tuple[int, ...], alone: list[list[int]]
) -> None:
    engine = make()
    answers = [engine.submit(one) for one in asked_of(engine, closing)]
    num_ahead = run_ahead(engine)
    assert [answer.token_ids for answer in answers] == alone
    assert num_ahead > 20


def test_a_request_goes_on_behind_any_token_with_the_same_ones(
    make: EngineMaker, closing: tuple[int, ...], alone: list[list[int]]
) -> None:
    engine = make()
    asked = asked_of(engine, closing)
    for count in (1, 5, 6, 10):  # before, in and behind the tag
        resumed = [
            msgspec.structs.replace(one, output_token_ids=tuple(tokens[:count]))
            for one, tokens in zip(asked, alone, strict=True)
            if len(tokens) > count
        ]
        answers = engine.generate(resumed)
        expected = [tokens[count:] for tokens in alone if len(tokens) > count]
        assert [answer.token_ids for answer in answers] == expected


def test_choices_of_one_prompt_think_as_long_as_if_each_were_asked_alone(
    make: EngineMaker, closing: tuple[int, ...]
) -> None:
    engine = make()
    budget = ThinkingBudget(5, "<think>", "</think>", closing, is_open=True)
    choices = tuple(
        msgspec.structs.replace(budgeted(free(engine)[0], budget, seed=seed), request_id=f"c{seed}")
        for seed in (5, 6, 7)
    )
    together = [Answer() for _ in choices]
    engine._answers.update(zip(engine.scheduler.add_all(choices), together, strict=True))
    engine.run()
    other = make(prefix_cache=False)
    assert len({tuple(answer.token_ids[:5]) for answer in together}) == 3
    for answer, one in zip(together, choices, strict=True):
        assert answer.token_ids[5:8] == list(closing)
        assert answer.token_ids == other.generate([one])[0].token_ids


def test_an_answer_that_opens_no_thought_is_what_it_would_have_been(
    make: EngineMaker, closing: tuple[int, ...], said: list[list[int]]
) -> None:
    engine = make()
    budget = ThinkingBudget(0, "<think>", "</think>", closing, is_open=False)
    answers = engine.generate([budgeted(one, budget) for one in free(engine)])
    assert [answer.token_ids for answer in answers] == said


def test_the_tag_comes_whatever_else_is_asked(
    make: EngineMaker, closing: tuple[int, ...], said: list[list[int]]
) -> None:
    engine = make()
    budget = ThinkingBudget(4, "<think>", "</think>", closing, is_open=True)
    rules: dict[str, Any] = {
        "bad_words": tuple((token,) for token in closing),
        "logit_bias": tuple((token, -100.0) for token in sorted(closing)),
        "allowed_tokens": b"\xff" * 1000,  # up to 8,000: of the tag they have only its end
        "min_tokens": 10,
        "held_back": (EOS, closing[0]),
        "min_p": 0.5,
    }
    asked = [budgeted(one, budget, **{name: rules[name]}) for one in free(engine) for name in rules]
    asked = [
        msgspec.structs.replace(one, request_id=str(number)) for number, one in enumerate(asked)
    ]
    for answer in engine.generate(asked):
        assert answer.token_ids[4:7] == list(closing)
