"""Thoughts with a budget over real ranks: closed behind it, and no other token changed."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.request import BASE, Request
from cluster.router.parser.call_grammar import CallSyntax, behind_thoughts
from cluster.router.parser.families import MessageFormat, MessageParser
from cluster.scheduler.config import SchedulerConfig
from deploy.local_engine import Answer, LocalEngine
from tests.end_to_end.engines import companies
from tests.end_to_end.test_structured_output import run_ahead
from tests.end_to_end.tiny_models import SHAPE, make_tiny_model
from worker.protocol import RankConfig, SamplingParams, ThinkingBudget

NUM_TOKENS = 30
EOS = 2
BUDGETS = (0, 1, 9, 1000)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "count": {"type": "integer", "maximum": 99}},
    "required": ["sure", "count"],
    "additionalProperties": False,
}
OPENED = MessageFormat(reasoning="qwen3", begins_in_thought=True)
Make = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokens are ASCII characters, one or two of them.

    No tag is a token, so that it is said in eight. Where characters end is left to the unit tests.
    """
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model("llama", path)
    pairs = [f"{first}{second}" for first in "abcdefghijkl" for second in "abcdefghijkl"]
    ascii_names = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # as the bytes of BPE are called
    names = ["<unk>", "<s>", "</s>", *ascii_names, *pairs][: SHAPE["vocab_size"]]
    raw = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(names[1:3])
    raw.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="module")
def closing(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode("</think>").ids)


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest, model: Path) -> Iterator[Make]:
    made: list[LocalEngine] = []

    def engine(**scheduler: Any) -> LocalEngine:
        rank = RankConfig(
            model_dir=str(model),
            rank=0,
            tp=request.param,
            dtype="float32",
            page_size=16,
            kv_memory_bytes=2**24,
            num_slots=1,
            max_model_len=256,
            num_threads=1,
        )
        settings: dict[str, Any] = {
            "num_pages": 0,
            "page_size": 16,
            "num_slots": 1,
            "max_running": 16,
            "max_waiting": 256,
            "token_budget": 256,
            "max_model_len": 256,
            "base_digest": "tiny",
        }
        made.append(LocalEngine(rank, SchedulerConfig(**settings | scheduler)))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def free() -> list[Request]:
    """Return requests without a budget, drawn in three ways."""
    drawn = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=1),
    )
    return [
        Request(f"free{way}", BASE, tuple(range(5 + way, 45 + way)), sampling, NUM_TOKENS)
        for way, sampling in enumerate(drawn)
    ]


def budgeted(one: Request, budget: ThinkingBudget, name: str, **changes: Any) -> Request:
    sampling = msgspec.structs.replace(one.sampling, thinking=budget, **changes)
    return msgspec.structs.replace(
        one, request_id=f"{one.request_id}.{budget.num_tokens}.{name}", sampling=sampling
    )


def opened(number: int, closing: tuple[int, ...]) -> ThinkingBudget:
    return ThinkingBudget(number, "<think>", "</think>", closing, is_open=True)


def asked(closing: tuple[int, ...]) -> list[Request]:
    """Return each free request with each budget, and with a form behind the thought."""
    schema = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    grammar = behind_thoughts(CallSyntax("hermes", "begun", {}), schema)
    made = []
    for one in free():
        made += [budgeted(one, opened(number, closing), "free") for number in BUDGETS]
        formed = budgeted(one, opened(9, closing), "form", grammar=grammar)
        made.append(msgspec.structs.replace(formed, max_tokens=120, stop_token_ids=(EOS,)))
    return made


@pytest.fixture(scope="module")
def said(make: Make) -> list[list[int]]:
    return [answer.token_ids for answer in make().generate(free())]


@pytest.fixture(scope="module")
def alone(make: Make, closing: tuple[int, ...]) -> list[list[int]]:
    """The tokens of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in asked(closing)]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.token_ids for answer in answers]


def test_a_thought_ends_behind_its_budget_and_is_what_it_would_have_been(
    said: list[list[int]], alone: list[list[int]], closing: tuple[int, ...]
) -> None:
    for number, thought in enumerate(said):
        for place, budget in enumerate(BUDGETS):
            tokens = alone[number * (len(BUDGETS) + 1) + place]
            assert len(tokens) == NUM_TOKENS
            count = min(budget, NUM_TOKENS)
            assert tokens[:count] == thought[:count]
            rest = tokens[count : count + len(closing)]
            assert rest == list(closing)[: NUM_TOKENS - count]


def test_a_form_begins_behind_it(
    alone: list[list[int]], closing: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    for tokens in alone[len(BUDGETS) :: len(BUDGETS) + 1]:
        assert tokens[9 : 9 + len(closing)] == list(closing)
        assert tokens[-1] == EOS
        text = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        message = MessageParser(OPENED).feed(text, ends=True)
        jsonschema.validate(json.loads(message.content), SCHEMA)


@pytest.mark.slow  # `make test-engines`
@pytest.mark.parametrize("scheduler", companies(num_pages=12, token_budget=24, max_chunk=16))
def test_company_chunks_and_preemption_change_no_token(
    make: Make,
    closing: tuple[int, ...],
    said: list[list[int]],
    alone: list[list[int]],
    scheduler: dict[str, Any],
) -> None:
    engine = make(**scheduler)
    answers = engine.generate([*asked(closing), *free()])
    assert [answer.token_ids for answer in answers] == [*alone, *said]
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.preemptions > 0


@pytest.mark.slow  # `make test-engines`
def test_steps_that_are_planned_ahead_change_no_token(
    make: Make, closing: tuple[int, ...], alone: list[list[int]]
) -> None:
    engine = make()
    answers = [engine.submit(one) for one in asked(closing)]
    num_ahead = run_ahead(engine)
    assert [answer.token_ids for answer in answers] == alone
    assert num_ahead > 20


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((1, 3, 10, 14, 25), id="some"),  # before, in and behind the tag
        pytest.param(range(1, NUM_TOKENS), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_request_goes_on_behind_any_token_with_the_same_ones(
    make: Make, closing: tuple[int, ...], alone: list[list[int]], counts: Sequence[int]
) -> None:
    engine = make()
    for count in counts:
        resumed = [
            msgspec.structs.replace(one, output_token_ids=tuple(tokens[:count]))
            for one, tokens in zip(asked(closing), alone, strict=True)
            if len(tokens) > count
        ]
        answers = engine.generate(resumed)
        expected = [tokens[count:] for tokens in alone if len(tokens) > count]
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.slow  # `make test-engines`
def test_choices_of_one_prompt_think_as_long_as_if_each_were_asked_alone(
    make: Make, closing: tuple[int, ...]
) -> None:
    engine = make()
    choices = tuple(
        budgeted(free()[1], opened(5, closing), str(seed), seed=seed) for seed in (5, 6, 7)
    )
    together = [Answer() for _ in choices]
    engine._answers.update(zip(engine.scheduler.add_all(choices), together, strict=True))
    engine.run()
    other = make(prefix_cache=False)
    assert len({tuple(answer.token_ids[:5]) for answer in together}) == 3
    for answer, one in zip(together, choices, strict=True):
        assert answer.token_ids[5 : 5 + len(closing)] == list(closing)
        assert answer.token_ids == other.generate([one])[0].token_ids


def test_an_answer_that_opens_no_thought_is_what_it_would_have_been(
    make: Make, closing: tuple[int, ...], said: list[list[int]]
) -> None:
    budget = ThinkingBudget(0, "<think>", "</think>", closing, is_open=False)
    answers = make().generate([budgeted(one, budget, "none") for one in free()])
    assert [answer.token_ids for answer in answers] == said


def test_an_answer_may_open_its_thought_itself(
    make: Make, closing: tuple[int, ...], tokenizer: Tokenizer
) -> None:
    tag = tuple(tokenizer.encode("\n<think>").ids)
    budget = ThinkingBudget(3, "<think>", "</think>", closing, is_open=False)
    begun = [
        msgspec.structs.replace(budgeted(one, budget, "opens"), output_token_ids=tag)
        for one in free()
    ]
    for answer in make().generate(begun):
        assert answer.token_ids[3 : 3 + len(closing)] == list(closing)


@pytest.mark.parametrize("rule", ["bad_words", "logit_bias", "allowed_tokens", "min_tokens"])
def test_the_tag_comes_whatever_else_is_asked(
    make: Make, closing: tuple[int, ...], rule: str
) -> None:
    rules: dict[str, dict[str, Any]] = {
        "bad_words": {"bad_words": tuple((token,) for token in sorted({*closing}))},
        "logit_bias": {"logit_bias": tuple((token, -100.0) for token in sorted({*closing}))},
        "allowed_tokens": {"allowed_tokens": b"\x08"},  # one that the tag has not
        "min_tokens": {"min_tokens": 20, "held_back": tuple(sorted({EOS, *closing}))},
    }
    made = [budgeted(one, opened(4, closing), rule, **rules[rule]) for one in free()]
    for answer in make().generate(made):
        assert answer.token_ids[4 : 4 + len(closing)] == list(closing)
