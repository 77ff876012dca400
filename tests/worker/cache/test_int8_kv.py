"""`--kv-cache-dtype int8`: whole models whose K and V are kept in 8 bits."""

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.battery import Engine, Made, check_surroundings
from tests.worker.peft_adapters import error

# Layers that see all, with head norms, with windows, with sinks, and beside mixers.
MODELS = ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_5"]


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close_to_those_over_kv_of_32_bits(tiny_model: Any, name: str, tp: int) -> None:
    prompt, found = (None, random_tokens(40, 3)), []
    for kind in ("auto", "int8"):
        with closing(LogitRanks(tiny_model(name).path, tp, kv_cache_dtype=kind)) as ranks:
            found += ranks.logits([prompt])
    assert 1e-5 < error(found[1], found[0]) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_row_of_a_batch_is_what_it_is_alone(
    tiny_model: Any, tp: int, dtype: torch.dtype
) -> None:
    prompts = [(None, random_tokens(length, length)) for length in (1, 17, 40)]
    path = tiny_model("llama").path
    with closing(LogitRanks(path, tp, dtype, kv_cache_dtype="int8")) as ranks:
        alone = [ranks.logits([prompt])[0] for prompt in prompts]
        for found, expected in zip(ranks.logits(prompts), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("gemma3", 1),
        pytest.param("qwen3_5", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_bfloat16", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_happens_around_an_answer_changes_none_of_its_tokens(
    tiny_model: Any, made: Any, name: str, tp: int, *, is_bfloat16: bool
) -> None:
    tiny = tiny_model(name)
    kind = "rank 8 on every linear" if name == "llama" else "little on all linears"
    model = Made(tiny.reference, tiny.path, made(name, kind))
    start = partial(Engine, model, tp, is_bfloat16=is_bfloat16, kv_cache_dtype="int8")
    with ExitStack() as stack:
        engine = stack.enter_context(closing(start()))
        check_surroundings(engine, lambda **small: stack.enter_context(closing(start(**small))))
