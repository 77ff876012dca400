"""Tokens and log-probabilities of a group of ranks against transformers on the same weights."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.llama_linears import LINEAR_MODULES
from tests.whole_modules import module_shape
from tests.worker.group import Prompt, TinyAdapter, random_tokens

KINDS = ("llama", "llama3_biased", "mistral", "qwen2", "qwen3")


def assert_like_reference(model: PreTrainedModel, prompt: Prompt, tolerance: float = 2e-4) -> None:
    """Check that every sampled token is the reference's choice, with its probabilities."""
    token_ids = (*prompt.token_ids, *prompt.sampled_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, len(prompt.token_ids) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    assert prompt.sampled_ids == logits.argmax(-1).tolist()
    for token, row in zip(prompt.sampled, expected, strict=True):
        found = torch.empty_like(row)
        for token_id, logprob in token.top_logprobs:
            found[token_id] = logprob
        torch.testing.assert_close(found, row, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_on_any_number_of_ranks(tiny_model, start_group, kind, tp):
    model = tiny_model(kind)
    group = start_group(model.path, tp=tp)
    prompts = [
        Prompt(random_tokens(75, 1)),
        Prompt(random_tokens(1, 2)),
        Prompt(random_tokens(33, 3), first_step=3),  # prefills while the others decode
    ]
    group.generate(prompts, num_tokens=6, chunk_size=32)
    for prompt in prompts:
        assert_like_reference(model.reference, prompt)
    assert len({token for prompt in prompts for token in prompt.sampled_ids}) > 6


def make_adapter(config, seed: int, modules=LINEAR_MODULES, layers=(0, 1)) -> TinyAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        for index, module in enumerate(modules):
            lora_rank = (1, 4, 8, 3, 16, 2, 5)[(index + seed) % 7]
            outputs, inputs = module_shape(config, module)
            a = torch.randn(lora_rank, inputs, generator=generator) * 0.3
            b = torch.randn(outputs, lora_rank, generator=generator) * 0.3
            tensors[layer, module] = (a, b, 0.5 + index % 7)
    return TinyAdapter(f"{seed:064x}", tensors)


def merged(model: PreTrainedModel, adapter: TinyAdapter) -> PreTrainedModel:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for (layer, module), (a, b, scaling) in adapter.tensors.items():
            block = model.model.layers[layer]
            parent = block.mlp if hasattr(block.mlp, module) else block.self_attn
            getattr(parent, module).weight += scaling * (b @ a)
    return model


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_two_adapters_and_the_base_share_a_batch(tiny_model, start_group, tp):
    model = tiny_model("llama")
    group = start_group(model.path, tp=tp)
    full = make_adapter(group.config, seed=1)
    partial = make_adapter(group.config, 2, modules=("v_proj", "down_proj"), layers=(1,))
    group.load_adapter(0, full)
    group.load_adapter(3, partial)
    prompts = [
        Prompt(random_tokens(40, 1), slot=3),
        Prompt(random_tokens(40, 1)),
        Prompt(random_tokens(40, 1), slot=0),
        Prompt(random_tokens(20, 2), slot=3, first_step=2),
    ]
    group.generate(prompts, num_tokens=5, chunk_size=24)
    references = {
        None: model.reference,
        0: merged(model.reference, full),
        3: merged(model.reference, partial),
    }
    for prompt in prompts:
        assert_like_reference(references[prompt.slot], prompt, tolerance=1e-3)
    assert len({tuple(prompt.sampled_ids) for prompt in prompts[:3]}) == 3


def test_a_slot_serves_its_new_adapter_and_nothing_of_the_old(tiny_model, start_group):
    model = tiny_model("qwen2")
    group = start_group(model.path, tp=2)
    old = make_adapter(group.config, seed=3)
    new = make_adapter(group.config, 4, modules=("q_proj",), layers=(0,))
    group.load_adapter(1, old)
    group.load_adapter(1, new)
    prompt = Prompt(random_tokens(20, 5), slot=1)
    group.generate([prompt], num_tokens=4)
    assert_like_reference(merged(model.reference, new), prompt, tolerance=1e-3)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_and_chunking_change_no_bit(tiny_model, start_group, dtype, tp):
    model = tiny_model("llama")

    def run(company: int, chunk_size: int, first_step: int = 1) -> list[object]:
        group = start_group(model.path, tp=tp, dtype=dtype)
        adapter = make_adapter(group.config, seed=1)
        group.load_adapter(0, adapter)
        group.load_adapter(1, make_adapter(group.config, seed=2))
        watched = [
            Prompt(random_tokens(70, 1), slot=0, first_step=first_step),
            Prompt(random_tokens(45, 2), first_step=first_step),
        ]
        others = [
            Prompt(random_tokens(9 + 13 * i, 10 + i), slot=(None, 0, 1)[i % 3])
            for i in range(company)
        ]
        group.generate([*others[::2], *watched, *others[1::2]], 6, chunk_size)
        return [[(t.token_id, t.top_logprobs) for t in prompt.sampled] for prompt in watched]

    whole = run(company=0, chunk_size=100)
    assert run(company=0, chunk_size=1) == whole
    assert run(company=0, chunk_size=23) == whole
    assert run(company=7, chunk_size=100) == whole
    assert run(company=5, chunk_size=17, first_step=4) == whole


def test_bfloat16_stays_near_float32(tiny_model, start_group):
    model = tiny_model("qwen3")
    group = start_group(model.path, tp=2, dtype="bfloat16")
    prompt = Prompt(random_tokens(50, 1))
    group.generate([prompt], num_tokens=1)
    with torch.inference_mode():
        logits = model.reference(torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = torch.log_softmax(logits, dim=-1)
    error = max(abs(p - expected[i].item()) for i, p in prompt.sampled[0].top_logprobs)
    assert error < 0.05 * expected.std().item() + 0.1
