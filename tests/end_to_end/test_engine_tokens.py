"""The engine's greedy tokens are those of transformers + peft, at every tensor-parallel size."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from deploy.local_engine import LocalEngine
from tests.end_to_end.engines import GREEDY, make_engine, random_prompt
from tests.end_to_end.reference import (
    QUESTIONS,
    TIE_IN_BFLOAT16,
    TIE_IN_BFLOAT16_BY_TORCH,
    chat_prompt,
    demo_reference,
)
from tests.end_to_end.server import adapter_dirs
from worker.protocol import RankConfig

pytestmark = pytest.mark.model


# test_server.py asks the same of two ranks in bfloat16.
QUICK = [(3, "float32", "c-short"), (1, "bfloat16", "torch-short")]
OTHERS = [
    *((1, "bfloat16", "c"), (2, "bfloat16", "c"), (3, "bfloat16", "c"), (4, "bfloat16", "c")),
    *((1, "float32", "c"), (2, "float32", "c"), (3, "float32", "c"), (4, "float32", "c")),
    *((1, "bfloat16", "torch"), (2, "bfloat16", "torch")),
    *((1, "float32", "torch"), (3, "float32", "torch")),
]


@dataclass(frozen=True)
class Run:
    """An engine, and what is asked of it."""

    engine: LocalEngine
    dtype: str
    tie: float
    models: tuple[str | None, ...]
    prompts: list[list[int]]
    num_tokens: int


@pytest.fixture(
    params=[*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)],
    ids=lambda p: f"tp{p[0]}-{p[1]}-{p[2]}",
    scope="module",
)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    tp, dtype, form = request.param
    with pytest.MonkeyPatch.context() as patch:
        if form.startswith("torch"):
            patch.setattr("kernels.dispatch.native_library", lambda: None)
        running = make_engine(tp, dtype)
    tie = TIE_IN_BFLOAT16_BY_TORCH if form.startswith("torch") else TIE_IN_BFLOAT16
    prompts = [chat_prompt(text) for text in QUESTIONS] + [random_prompt(700)]
    if form.endswith("short"):
        yield Run(running, dtype, tie, (None, next(iter(adapter_dirs()))), prompts[:-1], 20)
    else:
        yield Run(running, dtype, tie, (None, *adapter_dirs()), prompts, 40)
    running.close()


def test_greedy_tokens_of_base_and_adapters_are_those_of_transformers_and_peft(run: Run) -> None:
    running = run.engine
    adapters: dict[str | None, str] = {None: BASE}
    adapters |= {name: running.add_adapter(path) for name, path in adapter_dirs().items()}
    asked = [(name, prompt) for name in run.models for prompt in run.prompts]
    answers = running.generate(
        Request(str(i), adapters[name], tuple(prompt), GREEDY, max_tokens=run.num_tokens)
        for i, (name, prompt) in enumerate(asked)
    )
    reference = demo_reference()
    for (name, prompt), answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == run.num_tokens
        wrong = reference.wrong_tokens(name, prompt, answer.token_ids, run.dtype, run.tie)
        assert not wrong, f"adapter {name}, prompt {prompt[:8]}...: {wrong}"
    running.scheduler.check()


@pytest.mark.slow  # tiny models of every family see it in the quick run
def test_company_chunking_and_cache_change_no_token() -> None:
    crowd = make_engine(2, "bfloat16")
    digests = [BASE] + [crowd.add_adapter(path) for path in adapter_dirs().values()]
    prompts = [
        tuple(chat_prompt(t)) + tuple(random_prompt(60 * i)) for i, t in enumerate(QUESTIONS)
    ]
    requests = [
        Request(str(i), digests[i % 4], prompts[i % 8], GREEDY, max_tokens=24) for i in range(16)
    ]
    together = [a.token_ids for a in crowd.generate(requests)]
    again = [a.token_ids for a in crowd.generate(requests)]  # now from the cache
    crowd.close()
    alone = make_engine(2, "bfloat16", prefix_cache=False, token_budget=2048)
    for path in adapter_dirs().values():
        alone.add_adapter(path)
    one_by_one = [alone.generate([request])[0].token_ids for request in requests]
    alone.close()
    assert together == one_by_one
    assert again == one_by_one


# tests/worker/models/families asks the same, and more, of every family.
@pytest.mark.parametrize(
    "kind", ["qwen2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mistral", "qwen3"))]
)
def test_other_architectures_agree_with_transformers_at_every_size(
    kind: str, tmp_path: Path
) -> None:
    from tests.end_to_end.tiny_models import make_tiny_model

    make_tiny_model(kind, tmp_path)
    from tests.end_to_end.reference import Reference

    reference = Reference(tmp_path, {})
    prompts = [[5, 9, 2, 77, 31], random_prompt(90)]
    prompts[1] = [token % 256 for token in prompts[1]]
    for tp in (1, 2, 3, 4):
        rank = RankConfig(
            model_dir=str(tmp_path),
            rank=0,
            tp=tp,
            dtype="float32",
            page_size=16,
            kv_memory_bytes=2**22,
            num_slots=1,
            max_model_len=256,
            num_threads=1,
        )
        scheduler = SchedulerConfig(
            num_pages=0,
            page_size=16,
            num_slots=1,
            max_running=4,
            max_waiting=8,
            token_budget=32,
            max_model_len=256,
            base_digest=kind,
        )
        running = LocalEngine(rank, scheduler)
        answers = running.generate(
            Request(str(i), BASE, tuple(p), GREEDY, max_tokens=20) for i, p in enumerate(prompts)
        )
        running.close()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert not reference.wrong_tokens(None, prompt, answer.token_ids, "float32")
