"""Answers of a given form: always valid, and the same tokens whatever else happens."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLMatcher

from cluster.request import BASE, Request
from deploy.local_engine import Answer, LocalEngine
from tests.end_to_end.engines import EngineMaker, companies
from tests.end_to_end.server import MODEL_DIR, adapter_dirs
from worker.grammar import GrammarVocabulary
from worker.protocol import SamplingParams, encode_plan

pytestmark = pytest.mark.model

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "answer": {"enum": ["yes", "no", "perhaps"]},
            "reasons": {
                "type": "array",
                "items": {"type": "string", "minLength": 12, "maxLength": 20},
                "minItems": 5,
                "maxItems": 6,
            },
            "nested": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
        },
        "required": ["answer", "reasons"],
        "additionalProperties": False,
    },
]
EOS = 2


def grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


def requests(adapters: list[str], num_logprobs: int | None = None) -> list[Request]:
    """Return one request for each schema, adapter and way of drawing, and a free one for each."""
    made = []
    for adapter in (BASE, *adapters):
        for number, schema in enumerate([*SCHEMAS, None]):
            for temperature in (0.0, 1.0):
                index = len(made)
                sampling = SamplingParams(
                    temperature=temperature,
                    seed=index,
                    grammar="" if schema is None else grammar(schema),
                    num_logprobs=num_logprobs,
                )
                prompt = tuple(range(300 + 7 * number, 340 + 9 * number))
                num_tokens = 40 if schema is None else 160
                made.append(Request(f"r{index}", adapter, prompt, sampling, num_tokens, (EOS,)))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return GrammarVocabulary(MODEL_DIR, 49152, (EOS,)).tokenizer


SIZES = [pytest.param(2, id="tp2"), pytest.param(1, id="tp1", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param, "bfloat16") as maker:
        yield maker


def asked_of(engine: LocalEngine, num_logprobs: int | None = None) -> list[Request]:
    return requests([engine.add_adapter(adapter_dirs()["pirate"])], num_logprobs)


@pytest.fixture(scope="module")
def alone(make: EngineMaker) -> list[list[int]]:
    """The tokens of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in asked_of(engine)]
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert engine.scheduler.stats().counters.forced_tokens > 50
    return [answer.token_ids for answer in answers]


def test_every_answer_is_valid_and_ends_by_itself(alone: list[list[int]], tokenizer: Any) -> None:
    forms = [schema for _ in range(2) for schema in (*SCHEMAS, None) for _ in range(2)]
    assert len(forms) == len(alone)
    for schema, token_ids in zip(forms, alone, strict=True):
        if schema is not None:
            assert token_ids[-1] == EOS
            jsonschema.validate(json.loads(tokenizer.decode_str(token_ids[:-1])), schema)


@pytest.mark.slow  # `make test-engines`
@pytest.mark.parametrize("scheduler", companies(num_pages=5))
def test_company_chunks_and_preemption_change_no_token(
    make: EngineMaker, alone: list[list[int]], scheduler: dict[str, Any]
) -> None:
    engine = make(**scheduler)
    answers = engine.generate(asked_of(engine))
    assert [answer.token_ids for answer in answers] == alone
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.preemptions > 0


@pytest.mark.slow  # `make test-engines`
def test_steps_that_are_planned_ahead_change_no_token(
    make: EngineMaker, alone: list[list[int]]
) -> None:
    engine = make()
    answers = [engine.submit(one) for one in asked_of(engine)]
    num_ahead = run_ahead(engine)
    assert [answer.token_ids for answer in answers] == alone
    assert num_ahead > 20


def run_ahead(engine: LocalEngine) -> int:
    """Run to the end, with the next step planned before one is committed; return how many were."""
    frames: list[bytes] = []
    num_ahead = 0
    while True:
        while len(frames) < 2:
            plan = engine.scheduler.schedule()
            for load in engine.scheduler.take_loads():
                engine._load(load.slot, load.adapter)
                engine.scheduler.adapter_ready(load.adapter)
            if plan is None:
                break
            num_ahead += bool(frames)
            frame, engine._digest = encode_plan(plan, engine._digest)
            frames.append(frame)
        if not frames:
            return num_ahead
        for seq_id, event in engine.scheduler.commit(engine._run(frames.pop(0))):
            engine._answers[seq_id].take(event)


@pytest.mark.slow  # `make test-engines`
def test_log_probabilities_change_no_token_and_there_is_one_for_each(
    make: EngineMaker, alone: list[list[int]]
) -> None:
    engine = make()
    answers = engine.generate(asked_of(engine, num_logprobs=0))
    assert [answer.token_ids for answer in answers] == alone
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers)
    assert engine.scheduler.stats().counters.forced_tokens == 0


@pytest.mark.slow  # `make test-engines`
@pytest.mark.parametrize(
    "count", [13, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 5, 8))]
)
def test_a_request_goes_on_behind_any_token_with_the_same_ones(
    make: EngineMaker, alone: list[list[int]], count: int
) -> None:
    engine = make()
    resumed = [
        msgspec.structs.replace(one, output_token_ids=tuple(tokens[:count]))
        for one, tokens in zip(asked_of(engine), alone, strict=True)
        if len(tokens) > count
    ]
    answers = engine.generate(resumed)
    expected = [tokens[count:] for tokens in alone if len(tokens) > count]
    assert [answer.token_ids for answer in answers] == expected


@pytest.mark.slow  # in the quick run choices are forbidden tokens, which is the same road
@pytest.mark.parametrize("num_pages", [12, 0])
def test_choices_of_one_prompt_draw_what_each_would_alone(
    make: EngineMaker, tokenizer: Any, num_pages: int
) -> None:
    engine = make()
    prompts = [
        [
            msgspec.structs.replace(
                one,
                request_id=f"{one.request_id}/{seed}",
                token_ids=tuple(range(300, 475)),  # ends in the middle of a page
                sampling=msgspec.structs.replace(one.sampling, seed=seed),
            )
            for seed in range(3)
        ]
        for one in asked_of(engine)
        if one.sampling.grammar and one.sampling.temperature
    ]
    alone = [[engine.generate([one])[0].token_ids for one in choices] for choices in prompts]
    engine = make(num_pages=num_pages)
    asked_of(engine)
    forks = [[Answer() for _ in choices] for choices in prompts]
    for choices, answers in zip(prompts, forks, strict=True):
        seq_ids = engine.scheduler.add_all(tuple(choices))
        engine._answers.update(zip(seq_ids, answers, strict=True))
    engine.run()
    assert [[answer.token_ids for answer in answers] for answers in forks] == alone
    assert len({tuple(tokens) for tokens in alone[0]}) > 1
    counters = engine.scheduler.stats().counters
    assert counters.forked_sequences > 0 and (counters.preemptions > 0) == bool(num_pages)
    whole = [
        (schema, tokens)
        for schema, choices in zip([*SCHEMAS] * 2, alone, strict=True)
        for tokens in choices
        if tokens[-1] == EOS  # some strings are still open at the last token
    ]
    assert len(whole) > len(alone)
    for schema, tokens in whole:
        jsonschema.validate(json.loads(tokenizer.decode_str(tokens[:-1])), schema)
