"""Classes by the demo model are those of transformers and peft, the same bits in any company."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.request import BASE, Request
from deploy.local_engine import LocalEngine
from tests.end_to_end.engines import GREEDY, EngineMaker, companies, random_prompt
from tests.end_to_end.server import MODEL_DIR
from worker.protocol import SamplingParams

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,  # `make test-engines`; in the quick run servers see it
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LENGTHS = (1, 64, 150)
NUM_LABELS = {BASE: 3, "one": 1, "five": 5}  # of the model and of adapters
SIZES = [
    pytest.param((2, "float32"), id="tp2"),
    pytest.param((1, "bfloat16"), id="tp1", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Saved:
    """A classifier as transformers saves one, adapters as peft does, and logits as they compute."""

    model_dir: Path
    adapters: dict[str, Path]
    logits: dict[tuple[str, int], npt.NDArray[Any]]  # by adapter, or base, and length


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("classifiers")
    prompts = {length: torch.tensor([random_prompt(length)]) for length in LENGTHS}
    logits: dict[tuple[str, int], npt.NDArray[Any]] = {}
    adapters = {}
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        MODEL_DIR, num_labels=NUM_LABELS[BASE], dtype=torch.float32
    )
    for name, num_labels in NUM_LABELS.items():
        torch.manual_seed(num_labels)
        one: Any = copy.deepcopy(model)
        one.num_labels = num_labels
        one.score = torch.nn.Linear(one.config.hidden_size, num_labels, bias=False)
        with torch.no_grad():
            one.score.weight.copy_(torch.randn(one.score.weight.shape).bfloat16() * 0.1)
        if name == BASE:
            copy.deepcopy(one).to(torch.bfloat16).save_pretrained(folder / "model")
        else:
            targets = ["q_proj", "o_proj", "down_proj"]
            config = LoraConfig(
                task_type="SEQ_CLS", r=4, target_modules=targets, init_lora_weights=False
            )
            one = get_peft_model(one, config)
            with torch.no_grad():  # so that the model stays what it is
                for key, parameter in one.named_parameters():
                    parameter.mul_(0.1 if "lora_B" in key else 1)
            adapters[name] = folder / name
            one.save_pretrained(adapters[name])
        with torch.inference_mode():
            for length, tokens in prompts.items():
                logits[name, length] = one.eval()(tokens).logits[0].numpy()
    return Saved(folder / "model", adapters, logits)


@pytest.fixture(scope="module", params=SIZES)
def make(request: pytest.FixtureRequest) -> Iterator[EngineMaker]:
    with EngineMaker(*request.param) as maker:
        yield maker


def requests(adapters: dict[str, str]) -> dict[tuple[str, int], Request]:
    """Return one request for each adapter, by name, and length; prompts begin alike."""
    prompt = random_prompt(max(LENGTHS))
    sampling = SamplingParams(temperature=0.0, pooling="classify")
    return {
        (name, length): Request(
            f"{name}{length}", digest, tuple(prompt[:length]), sampling, max_tokens=1
        )
        for name, digest in adapters.items()
        for length in LENGTHS
    }


def answers(engine: LocalEngine, asked: list[Request]) -> list[bytes]:
    found = engine.generate(asked)
    assert all(answer.token_ids == [] and answer.error is None for answer in found)
    return [answer.pooled for answer in found]


def alone(engine: LocalEngine, asked: dict[tuple[str, int], Request]) -> list[bytes]:
    """Return what becomes of each request with nothing beside it."""
    return [answers(engine, [request])[0] for request in asked.values()]


def check(found: dict[tuple[str, int], bytes], saved: Saved, make: EngineMaker) -> None:
    """Compare all logits together: one of them alone may be next to nothing."""
    ours = {key: np.frombuffer(values, "<f4") for key, values in found.items()}
    assert all(one.shape == saved.logits[key].shape for key, one in ours.items())
    wanted = np.concatenate([saved.logits[key] for key in ours])
    limit = 1e-5 if make.dtype == "float32" else 2e-2
    error = np.linalg.norm(np.concatenate(list(ours.values())) - wanted)
    assert error < limit * np.linalg.norm(wanted), (ours, wanted)


def test_a_models_head_gives_the_logits_of_transformers(make: EngineMaker, saved: Saved) -> None:
    asked = requests({BASE: BASE})
    found = alone(make(model_dir=saved.model_dir), asked)
    check(dict(zip(asked, found, strict=True)), saved, make)


@pytest.fixture(scope="module")
def by_adapters(make: EngineMaker, saved: Saved) -> list[bytes]:
    """What the adapters' heads make of each prompt by itself: the measure of all others."""
    engine = make()
    digests = {name: engine.add_adapter(path) for name, path in saved.adapters.items()}
    return alone(engine, requests(digests))


def test_adapters_heads_give_the_logits_of_peft(
    make: EngineMaker, saved: Saved, by_adapters: list[bytes]
) -> None:
    keys = requests(dict.fromkeys(saved.adapters, "any"))
    check(dict(zip(keys, by_adapters, strict=True)), saved, make)


@pytest.mark.parametrize("scheduler", companies(num_pages=4))
def test_company_chunks_and_caches_change_no_bit(
    make: EngineMaker, saved: Saved, by_adapters: list[bytes], scheduler: dict[str, Any]
) -> None:
    engine = make(**scheduler)
    digests = {name: engine.add_adapter(path) for name, path in saved.adapters.items()}
    asked = list(requests(digests).values())
    prompt = asked[-1].token_ids
    chats = [engine.submit(Request(f"c{i}", BASE, (5, i), GREEDY, 40)) for i in range(3)]
    embedded = SamplingParams(temperature=0.0, pooling="mean")
    vector = engine.submit(Request("v", digests["five"], prompt, embedded, 1))
    assert answers(engine, [*asked, *asked]) == [*by_adapters, *by_adapters]
    assert all(len(chat.token_ids) == 40 for chat in chats) and vector.pooled
    counters = engine.scheduler.stats().counters
    assert counters.generated_tokens == 120, "a class is no token"
    if not scheduler:
        assert counters.cached_prompt_tokens > 0
