"""Log-probabilities of prompts: those of transformers, those that the same tokens had as output,
and the same bits in any company."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cluster.request import BASE, Request
from deploy.local_engine import LocalEngine
from tests.end_to_end.engines import EngineMaker, companies, random_prompt
from tests.end_to_end.reference import demo_reference
from tests.end_to_end.server import adapter_dirs
from worker.protocol import SamplingParams, TokenLogprobs

pytestmark = [pytest.mark.model, pytest.mark.slow]  # `make test-engines`
LENGTHS = (1, 65, 150)
NUM_BEST = 3


SIZES = [
    pytest.param((2, "float32"), id="tp2"),
    pytest.param((1, "bfloat16"), id="tp1"),
]


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(*request.param) as maker:
        yield maker


def requests(engine: LocalEngine) -> list[Request]:
    """Return one request for each adapter and length; prompts begin alike."""
    pirate = engine.add_adapter(adapter_dirs()["pirate"])
    prompt = random_prompt(max(LENGTHS))
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=NUM_BEST)
    return [
        Request(f"{adapter[:4]}{length}", adapter, tuple(prompt[:length]), sampling, max_tokens=3)
        for adapter in (BASE, pirate)
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def alone(make: EngineMaker) -> list[tuple[TokenLogprobs, ...]]:
    """What each request gets with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in requests(engine)]
    return [answer.prompt_logprobs for answer in answers]


def test_they_are_those_of_transformers_and_peft(
    make: EngineMaker, alone: list[tuple[TokenLogprobs, ...]]
) -> None:
    prompt = random_prompt(max(LENGTHS))
    limit = 1e-4 if make.dtype == "float32" else 0.3
    found = iter(alone)
    for adapter in (None, "pirate"):
        logprobs = torch.log_softmax(demo_reference().logits(adapter, prompt), dim=-1)
        for length in LENGTHS:
            ours = next(found)
            assert len(ours) == length - 1
            for position, (logprob, top, rank) in enumerate(ours):
                assert abs(logprob - float(logprobs[position, prompt[position + 1]])) < limit
                assert len(top) == NUM_BEST
                own = logprobs[position, prompt[position + 1]]
                num_above = int((logprobs[position] > own + 2 * limit).sum())
                assert num_above < rank <= int((logprobs[position] >= own - 2 * limit).sum())
                assert rank > NUM_BEST or prompt[position + 1] in dict(top)
                for token_id, value in top:
                    assert abs(value - float(logprobs[position, token_id])) < limit
                assert [value for _, value in top] == sorted((v for _, v in top), reverse=True)


def test_a_token_has_the_log_probability_as_prompt_that_it_had_as_output(
    make: EngineMaker,
) -> None:
    engine = make()
    prompt = tuple(random_prompt(70))
    drawn = SamplingParams(temperature=0.8, seed=5, num_logprobs=0)
    (output,) = engine.generate([Request("o", BASE, prompt, drawn, 40)])
    whole = (*prompt, *output.token_ids)
    scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
    (again,) = engine.generate([Request("p", BASE, whole, scored, 1)])
    assert [logprob for logprob, _, _ in again.prompt_logprobs[-40:]] == output.logprobs


@pytest.mark.parametrize("scheduler", companies(num_pages=4))
def test_company_chunks_and_caches_change_no_bit(
    make: EngineMaker,
    alone: list[tuple[TokenLogprobs, ...]],
    scheduler: dict[str, Any],
) -> None:
    engine = make(**scheduler)
    asked = requests(engine)
    answers = engine.generate([*asked, *asked])
    assert [answer.prompt_logprobs for answer in answers] == [*alone, *alone]
    if "num_pages" in scheduler:
        assert engine.scheduler.stats().counters.evicted_pages > 0
