"""Bad words and allowed tokens over the real engine: kept to, and no token changed by company."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cluster.request import BASE, Request
from deploy.local_engine import Answer, LocalEngine
from tests.end_to_end.engines import EngineMaker, companies
from tests.end_to_end.server import adapter_dirs
from tests.end_to_end.test_structured_output import run_ahead
from worker.protocol import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]  # `make test-engines`

NUM_TOKENS = 24
# Half of the vocabulary, in which are the tokens that models of English like best.
ALLOWED = frozenset(range(100, 49152, 2))


def bits(token_ids: frozenset[int]) -> bytes:
    flags = np.zeros(max(token_ids) + 1, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()


SIZES = [pytest.param(2, id="tp2"), pytest.param(1, id="tp1")]


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(request.param, "bfloat16") as maker:
        yield maker


def free(engine: LocalEngine) -> list[Request]:
    """Return a request of the base model and one of an adapter, without any rule."""
    made = []
    adapter = engine.add_adapter(adapter_dirs()["pirate"])
    for number, (name, temperature) in enumerate(((BASE, 1.0), (adapter, 0.0))):
        sampling = SamplingParams(temperature=temperature, seed=number)
        prompt = tuple(range(300 + 7 * number, 410 + 9 * number))
        made.append(Request(f"free{number}", name, prompt, sampling, NUM_TOKENS))
    return made


def ruled(engine: LocalEngine, said: list[list[int]]) -> list[Request]:
    """Return for each free request three that forbid some of what it said."""
    made = []
    for number, (one, tokens) in enumerate(zip(free(engine), said, strict=True)):
        pairs = tuple(sorted(set(zip(tokens, tokens[1:], strict=False))))[::2]
        rules: list[dict[str, Any]] = [
            {"bad_words": tuple(sorted((token,) for token in set(tokens[::3])))},
            {"bad_words": pairs},
            {"allowed_tokens": bits(ALLOWED), "bad_words": pairs},
        ]
        for rule, changes in enumerate(rules):
            sampling = msgspec.structs.replace(one.sampling, **changes)
            made.append(
                msgspec.structs.replace(one, request_id=f"r{number}.{rule}", sampling=sampling)
            )
    return made


@pytest.fixture(scope="module")
def said(make: EngineMaker) -> list[list[int]]:
    engine = make()
    return [answer.token_ids for answer in engine.generate(free(engine))]


@pytest.fixture(scope="module")
def alone(make: EngineMaker, said: list[list[int]]) -> list[list[int]]:
    """The tokens of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in ruled(engine, said)]
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.token_ids for answer in answers]


def test_what_is_forbidden_never_comes_and_would_have(
    make: EngineMaker, said: list[list[int]], alone: list[list[int]]
) -> None:
    requests = ruled(make.current, said)
    for number, (request, tokens) in enumerate(zip(requests, alone, strict=True)):
        assert len(tokens) == NUM_TOKENS
        assert tokens != said[number // 3]
        for word in request.sampling.bad_words:
            ends = range(len(word), len(tokens) + 1)
            assert all(tuple(tokens[end - len(word) : end]) != word for end in ends)
        if request.sampling.allowed_tokens:
            assert set(tokens) <= ALLOWED


@pytest.mark.parametrize("scheduler", companies(num_pages=5))
def test_company_chunks_and_preemption_change_no_token(
    make: EngineMaker,
    said: list[list[int]],
    alone: list[list[int]],
    scheduler: dict[str, Any],
) -> None:
    engine = make(**scheduler)
    answers = engine.generate([*ruled(engine, said), *free(engine)])
    assert [answer.token_ids for answer in answers] == [*alone, *said]
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.preemptions > 0


def test_steps_that_are_planned_ahead_change_no_token(
    make: EngineMaker, said: list[list[int]], alone: list[list[int]]
) -> None:
    engine = make()
    answers = [engine.submit(one) for one in ruled(engine, said)]
    num_ahead = run_ahead(engine)
    assert [answer.token_ids for answer in answers] == alone
    assert num_ahead > 5


def test_a_request_goes_on_behind_any_token_with_the_same_ones(
    make: EngineMaker, said: list[list[int]], alone: list[list[int]]
) -> None:
    engine = make()
    asked = ruled(engine, said)
    for count in (1, 2, 13):
        resumed = [
            msgspec.structs.replace(one, output_token_ids=tuple(tokens[:count]))
            for one, tokens in zip(asked, alone, strict=True)
        ]
        answers = engine.generate(resumed)
        assert [answer.token_ids for answer in answers] == [tokens[count:] for tokens in alone]


def test_choices_of_one_prompt_keep_to_the_rules_as_if_each_were_asked_alone(
    make: EngineMaker, said: list[list[int]]
) -> None:
    engine = make()
    choices = []
    for seed in (5, 6, 7):
        one = ruled(engine, said)[1]
        sampling = msgspec.structs.replace(one.sampling, seed=seed)
        choices.append(msgspec.structs.replace(one, request_id=f"c{seed}", sampling=sampling))
    together = [Answer() for _ in choices]
    engine._answers.update(zip(engine.scheduler.add_all(tuple(choices)), together, strict=True))
    engine.run()
    other = make(prefix_cache=False)
    for answer, one in zip(together, choices, strict=True):
        assert answer.token_ids == other.generate([one])[0].token_ids
