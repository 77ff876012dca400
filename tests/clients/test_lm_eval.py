"""lm-evaluation-harness over HTTP gives what it gives of the same weights in transformers."""

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS, adapter_dirs

TASKS = Path(__file__).parent / "lm_eval"
NUM_QUESTIONS, NUM_CHOICES = 16, 4

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a context and of what follows it
Scores = dict[Pair, list[float]]  # the log-probability of each token that follows


class OverHttp(LocalCompletionsAPI):
    """`local-completions`, which keeps the log-probability of each token."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tokens: Scores = {}

    def parse_logprobs(
        self, outputs: Any, tokens: Any = None, ctxlens: Any = None, **other: Any
    ) -> list[tuple[float, bool]]:
        given = outputs if isinstance(outputs, list) else [outputs]
        choices = sorted((c for one in given for c in one["choices"]), key=lambda c: c["index"])
        for choice, ids, length in zip(choices, tokens, ctxlens, strict=True):
            pair = (tuple(ids[:length]), tuple(ids[length:]))
            self.tokens[pair] = choice["logprobs"]["token_logprobs"][length:-1]
        return super().parse_logprobs(outputs, tokens, ctxlens, **other)


class ByTransformers(HFLM):
    """`hf`, which keeps what it was asked for, and computes each token of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pairs: set[Pair] = set()

    def _loglikelihood_tokens(self, requests: Any, **other: Any) -> Any:
        self.pairs |= {(tuple(context), tuple(rest)) for _, context, rest in requests}
        return super()._loglikelihood_tokens(requests, **other)

    @torch.inference_mode()
    def logprobs(self, pair: Pair) -> list[float]:
        context, rest = pair
        logits = self.model(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1]
        scores = torch.log_softmax(logits.float(), dim=-1)
        return scores.gather(1, torch.tensor(rest)[:, None])[:, 0].tolist()


def by_transformers(model_dir: Path, model: str, dtype: str) -> ByTransformers:
    adapter = adapter_dirs().get(model)
    return ByTransformers(
        pretrained=str(model_dir),
        peft=adapter and str(adapter),
        dtype=dtype,
        softmax_dtype="float32",
        device="cpu",
    )


def over_http(url: str, model_dir: Path, model: str, **extra: Any) -> OverHttp:
    settings = {"num_concurrent": 4, "max_retries": 1, **extra}
    return OverHttp(
        model=model, tokenizer=str(model_dir), base_url=f"{url}/v1/completions", **settings
    )


@cache
def tasks() -> TaskManager:
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def evaluate(lm: Any, task: str, **extra: Any) -> tuple[dict[str, float], list[Any]]:
    """Return what lm-eval measures with a task, and the answers in order."""
    found: Any = simple_evaluate(lm, tasks=[task], task_manager=tasks(), bootstrap_iters=0, **extra)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    figures = {
        name: value
        for name, value in found["results"][task].items()
        if isinstance(value, float) and "stderr" not in name
    }
    return figures, [sample["resps"] for sample in samples]


@pytest.fixture(scope="session")
def urls(server: Endpoint) -> dict[str, str]:
    return {"bfloat16": server.url, "float32": os.environ["TOPWORK_FLOAT32_URL"]}


def differences(one: Scores, other: Scores) -> list[float]:
    """Return how far apart two are at each token."""
    return [abs(a - b) for pair in sorted(one) for a, b in zip(one[pair], other[pair], strict=True)]


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_multiple_choice_task_has_the_score_and_tokens_of_transformers(
    urls: dict[str, str], model_dir: Path, model: str, dtype: str
) -> None:
    theirs = by_transformers(model_dir, model, dtype)
    ours = over_http(urls[dtype], model_dir, model)
    wanted, _ = evaluate(theirs, "topwork_choices")
    found, _ = evaluate(ours, "topwork_choices")
    assert set(found) == {"acc,none", "acc_norm,none"}
    assert found == wanted
    assert set(ours.tokens) == theirs.pairs
    assert len(theirs.pairs) == NUM_QUESTIONS * NUM_CHOICES
    exact = by_transformers(model_dir, model, "float32")
    scores = {pair: theirs.logprobs(pair) for pair in theirs.pairs}
    exact_scores = {pair: exact.logprobs(pair) for pair in theirs.pairs}
    off, off_exact = differences(ours.tokens, scores), differences(ours.tokens, exact_scores)
    theirs_off = differences(scores, exact_scores)
    print(f"\n{model} {dtype}: {found}, {len(off)} tokens")
    for what, values in (
        ("ours and theirs", off),
        ("ours and theirs in float32", off_exact),
        ("theirs and theirs in float32", theirs_off),
    ):
        near = sum(value < 2e-2 for value in values) / len(values)
        print(f"  {what}: {max(values):.2g} at most, {rms(values):.2g} rms, {near:.0%} under 2e-2")
    if dtype == "float32":
        assert max(off) < 1e-4
    else:  # in which transformers is not itself to 1e-2 either
        assert rms(off_exact) < rms(theirs_off)


def test_the_servers_tokenizer_and_batches_change_nothing(
    urls: dict[str, str], model_dir: Path
) -> None:
    usual = over_http(urls["bfloat16"], model_dir, "smollm2")
    others = (
        OverHttp(
            model="smollm2",
            base_url=f"{urls['bfloat16']}/v1/completions",
            tokenizer_backend="remote",
            max_retries=1,
        ),
        over_http(urls["bfloat16"], model_dir, "smollm2", batch_size=8, num_concurrent=1),
    )
    wanted = evaluate(usual, "topwork_choices")
    for other in others:
        assert evaluate(other, "topwork_choices") == wanted
        assert other.tokens == usual.tokens


@pytest.mark.parametrize("model", MODELS[:2])
def test_greedy_answers_are_those_of_transformers(
    urls: dict[str, str], model_dir: Path, model: str
) -> None:
    wanted = evaluate(by_transformers(model_dir, model, "float32"), "topwork_answers")
    ours = over_http(urls["float32"], model_dir, model)
    assert evaluate(ours, "topwork_answers") == wanted


def test_greedy_answers_of_chats_are_those_of_transformers(
    urls: dict[str, str], model_dir: Path
) -> None:
    theirs = by_transformers(model_dir, MODELS[1], "float32")
    ours = LocalChatCompletion(
        model=MODELS[1], base_url=f"{urls['float32']}/v1/chat/completions", max_retries=1
    )
    wanted = evaluate(theirs, "topwork_answers", apply_chat_template=True)
    assert evaluate(ours, "topwork_answers", apply_chat_template=True) == wanted
