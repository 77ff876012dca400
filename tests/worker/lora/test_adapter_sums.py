"""Weighted sums of adapters, from their directories to logits, against PEFT's merged weights."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from cluster.adapters.sharding import cut
from tests.worker.conftest import TinyModel
from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import MODELS, error, read, rewrite
from worker.errors import UnusableAdapter
from worker.lora.memory import claimed_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RSLORA = "rank and alpha patterns under rslora"  # ranks 3, 4 and 7
Term = tuple[str, torch.dtype, float]  # kind, dtype it is stored in, weight
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
SUMS: dict[str, tuple[Term, ...]] = {
    "of two": ((RSLORA, FLOAT32, 0.75), ("an expression and a layer", FLOAT32, -1.25)),
    "of two dtypes": ((RSLORA, BFLOAT16, -0.5), ("an expression and a layer", FLOAT16, 1.5)),
    "of three that overlap in part": (
        ("lora on both ends", FLOAT32, 0.6),
        (RSLORA, FLOAT16, 0.7),
        ("lora on the embedding", FLOAT32, -1.5),
    ),
    "of the two ends": (
        ("lora on the embedding", FLOAT32, 2.0),
        ("lora on the head", FLOAT32, -0.3),
    ),
    "of one": (("lora on both ends", FLOAT32, 0.4),),
}


@pytest.fixture(scope="session")
def stored(
    made: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, torch.dtype], Path]:
    """Return a function that gives an adapter of some kind with its tensors in some dtype."""
    folders: dict[tuple[str, str, torch.dtype], Path] = {}

    def store(model_name: str, kind: str, dtype: torch.dtype) -> Path:
        key = (model_name, kind, dtype)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("stored")
            rewrite(made(model_name, kind), folders[key], lambda tensor: tensor.to(dtype))
        return folders[key]

    return store


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose ends can change apart, as adapters change them."""
    apart = copy.deepcopy(model)
    apart.config.tie_word_embeddings = False
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    return apart


def by_merging(
    base: PreTrainedModel, terms: list[tuple[Path, float]], tokens: tuple[int, ...]
) -> Tensor:
    """Return the logits of the base model plus the weighted changes that PEFT merges into it."""
    model = untied(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = {name: tensor.double() for name, tensor in before.items()}
    for folder, weight in terms:
        merged = PeftModel.from_pretrained(untied(base), folder).merge_and_unload()
        for name, tensor in merged.state_dict().items():
            total[name] += weight * (tensor.double() - before[name].double())
    model.load_state_dict({name: tensor.float() for name, tensor in total.items()})
    with torch.inference_mode():
        logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", SUMS)
def test_logits_of_a_sum_are_those_of_the_merged_weights(
    tiny_model: Callable[[str], TinyModel],
    stored: Callable[[str, str, torch.dtype], Path],
    ranks: Callable[..., LogitRanks],
    name: str,
    model_name: str,
    tp: int,
) -> None:
    group = ranks(model_name, tp, FLOAT32)
    weights = [weight for *_, weight in SUMS[name]]
    folders = [stored(model_name, kind, dtype) for kind, dtype, _ in SUMS[name]]
    adapters = [read(folder, group.config) for folder in folders]
    held = group.load(0, *adapters, weights=weights)
    tokens = random_tokens(21, 3)
    found, plain = group.logits([(0, tokens), (None, tokens)])
    terms = list(zip(folders, weights, strict=True))
    expected = by_merging(tiny_model(model_name).reference, terms, tokens)
    assert error(found, expected) < 1e-4
    assert error(plain, expected) > 1e-3  # the sum does something
    for rank, num_bytes in zip(group.ranks, held, strict=True):
        claims = [claimed_bytes(cut(one, rank.part), rank.part, 4, 4) for one in adapters]
        assert 0 < num_bytes == rank.bank.num_bytes(0) <= sum(claims)


def test_every_row_of_a_batch_with_sums_is_what_it_is_alone(
    stored: Callable[[str, str, torch.dtype], Path], ranks: Callable[..., LogitRanks]
) -> None:
    group = ranks("llama", 2, FLOAT32)
    for slot, terms in enumerate(SUMS.values()):
        adapters = [read(stored("llama", kind, dtype), group.config) for kind, dtype, _ in terms]
        group.load(slot, *adapters, weights=[weight for *_, weight in terms])
    prompts = [(slot, random_tokens(length, length)) for length in (1, 9, 4) for slot in range(5)]
    alone = [group.logits([prompt])[0] for prompt in prompts]
    for found, expected in zip(group.logits(prompts), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, -0.5]])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dora", r"has DoRA on q_proj \(layer 0\) and cannot be part of a weighted sum"),
        ("dora on both ends", r"has DoRA on down_proj \(layer 0\)"),
        ("saved embedding", "brings another embed_tokens than the base model's"),
        ("saved head", "brings another lm_head than the base model's"),
    ],
)
def test_what_has_no_weighted_sum_is_refused_by_name_and_the_slot_is_empty_then(
    made: Callable[[str, str], Path],
    ranks: Callable[..., LogitRanks],
    kind: str,
    reason: str,
    weights: list[float],
) -> None:
    group = ranks("llama", 2, FLOAT32)
    plain, odd = (read(made("llama", name), group.config) for name in (RSLORA, kind))
    group.load(0, plain)
    with pytest.raises(UnusableAdapter, match=f"^adapter {odd.digest} {reason}"):
        group.load(0, plain, odd, weights=weights)
    with pytest.raises(UnusableAdapter, match=f"^adapter {odd.digest} {reason}"):
        group.load(0, odd, weights=[0.5])
    assert group.ranks[0].bank.adapter(0) is None


def test_a_weight_that_float32_cannot_hold_is_refused(
    made: Callable[[str, str], Path], ranks: Callable[..., LogitRanks]
) -> None:
    group = ranks("llama", 1, FLOAT32)
    adapter = read(made("llama", RSLORA), group.config)
    for weight in (1e38 * 1e3, -1e300, float("inf")):
        with pytest.raises(UnusableAdapter, match=f"{adapter.digest} on q_proj .* over what"):
            group.load(0, adapter, replace(adapter, digest="ff"), weights=[weight, 1.0])
