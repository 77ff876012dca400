"""Every kind of adapter that PEFT makes, from its directory to logits, against PEFT itself."""

import copy

import pytest
import torch

from tests.worker.group import random_tokens
from tests.worker.peft_adapters import KINDS, MODELS, TOLERANCE, by_peft, error, read

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(tiny_model, made, ranks, kind, model_name, dtype, tp):
    """PEFT computes in float32 on bfloat16 weights: its own bfloat16 is off by more than ours."""
    model, folder = tiny_model(model_name), made(model_name, kind)
    group = ranks(model_name, tp, dtype)
    group.load(0, read(folder, group.config))
    tokens = random_tokens(21, 3)
    (found,) = group.logits([(0, tokens)])
    expected = by_peft(copy.deepcopy(model.reference).to(dtype), folder, tokens)
    assert error(found, expected) < TOLERANCE[dtype]
    (plain,) = group.logits([(None, tokens)])
    assert error(plain, expected) > 5 * TOLERANCE[dtype]  # the adapter does something


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("model_name", MODELS)
def test_every_row_of_a_mixed_batch_is_what_it_is_alone(made, ranks, model_name, dtype, tp):
    kinds = ("lora on both ends", "dora", "saved both", "dora on both ends", "saved head")
    group = ranks(model_name, tp, dtype)
    for slot, kind in enumerate(kinds):
        group.load(slot, read(made(model_name, kind), group.config))
    prompts = [
        (slot, random_tokens(length, length + 7 * turn))
        for turn, length in enumerate((1, 19, 4, 37))
        for slot in (3, None, 0, 4, 2, 1)
    ]
    alone = [group.logits([prompt])[0] for prompt in prompts]
    for found, expected in zip(group.logits(prompts), alone, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(group.logits(prompts[::-2]), alone[::-2], strict=True):
        assert torch.equal(found, expected)
    first = [alone[i] for i in range(6, 12)]  # six adapters, prompts of one length
    assert len({tuple(logits[0].tolist()) for logits in first}) == 6
