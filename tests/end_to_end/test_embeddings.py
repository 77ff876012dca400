"""Embeddings of the demo model are those of transformers, and the same bits in any company."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.request import BASE, Request
from deploy.local_engine import LocalEngine
from tests.end_to_end.engines import GREEDY, EngineMaker, companies, random_prompt
from tests.end_to_end.reference import demo_reference
from tests.end_to_end.server import adapter_dirs
from worker.protocol import Pooling, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]  # `make test-engines`
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 64, 150)


SIZES = [
    pytest.param((2, "float32"), id="tp2"),
    pytest.param((1, "bfloat16"), id="tp1"),
]


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(*request.param) as maker:
        yield maker


def requests(engine: LocalEngine) -> list[Request]:
    """Return one request for each adapter, pooling and length; prompts begin alike."""
    pirate = engine.add_adapter(adapter_dirs()["pirate"])
    prompt = random_prompt(max(LENGTHS))
    return [
        Request(
            f"r{adapter[:4]}{pooling}{length}",
            adapter,
            tuple(prompt[:length]),
            SamplingParams(temperature=0.0, pooling=pooling),
            max_tokens=1,
        )
        for adapter in (BASE, pirate)
        for pooling in POOLINGS
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def alone(make: EngineMaker) -> list[bytes]:
    """The embedding of each request with nothing beside it: the measure of all others."""
    engine = make()
    answers = [engine.generate([one])[0] for one in requests(engine)]
    assert all(answer.token_ids == [] and answer.error is None for answer in answers)
    return [answer.pooled for answer in answers]


@torch.inference_mode()
def reference(adapter: str | None, token_ids: list[int], pooling: Pooling) -> npt.NDArray[Any]:
    model = demo_reference()._model
    if adapter is None:
        with model.disable_adapter():
            states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    else:
        model.set_adapter(adapter)
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    last = states[-1][0]
    return (last[-1] if pooling == "last" else last.mean(0)).numpy()


def test_embeddings_are_those_of_transformers_and_peft(
    make: EngineMaker, alone: list[bytes]
) -> None:
    prompt = random_prompt(max(LENGTHS))
    found = iter(alone)
    limit = 1e-5 if make.dtype == "float32" else 0.02
    for adapter in (None, "pirate"):
        for pooling in POOLINGS:
            for length in LENGTHS:
                ours = np.frombuffer(next(found), dtype="<f4")
                wanted = reference(adapter, prompt[:length], pooling)
                cosine = ours @ wanted / np.linalg.norm(ours) / np.linalg.norm(wanted)
                assert 1 - cosine < limit, (adapter, pooling, length)
                ratio = np.linalg.norm(ours) / np.linalg.norm(wanted)
                assert abs(ratio - 1) < limit, (adapter, pooling, length)


@pytest.mark.parametrize("scheduler", companies(num_pages=4))
def test_company_chunks_and_caches_change_no_bit(
    make: EngineMaker, alone: list[bytes], scheduler: dict[str, Any]
) -> None:
    engine = make(**scheduler)
    asked = requests(engine)
    chats = [engine.submit(Request(f"c{i}", BASE, (5, i), GREEDY, 40)) for i in range(3)]
    answers = engine.generate([*asked, *asked])
    assert [answer.pooled for answer in answers] == [*alone, *alone]
    assert all(len(chat.token_ids) == 40 for chat in chats)
    counters = engine.scheduler.stats().counters
    assert counters.generated_tokens == 120, "an embedding is no token"
    if not scheduler:
        assert counters.cached_prompt_tokens > 0
