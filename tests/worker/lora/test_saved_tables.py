"""Tables that adapters bring, exports of other tools, and adapters that no rank can compute."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cluster.adapters.sharding import cut
from tests.worker.group import random_tokens
from tests.worker.peft_adapters import BOTH, MODELS, SEVEN, by_peft, error, read, train
from worker.errors import UnusableAdapter
from worker.lora.adapter_bank import AdapterBank
from worker.lora.base_weights import BaseWeights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_the_base_models_own_table_beneath_a_lora_is_not_kept(made, ranks):
    """PEFT saves it with every LoRA of the vocabulary."""
    group = ranks("llama", 2, torch.float32)
    adapter = read(made("llama", "lora on both ends"), group.config)
    assert [table.module for table in adapter.tables] == ["embed_tokens", "lm_head"]
    group.load(0, adapter)
    table_bytes = adapter.tables[0].weight.nbytes
    for rank in group.ranks:
        assert 0 < rank.bank.num_bytes(0) < adapter.num_bytes - table_bytes
    group.load(0, read(made("llama", "saved both"), group.config))
    held = sum(rank.bank.num_bytes(0) for rank in group.ranks)
    assert held > 2 * table_bytes  # a table for looking up, and one for multiplying


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("model_name", MODELS)
def test_another_table_beneath_a_lora_takes_the_place_of_the_base_models(
    tiny_model, ranks, tmp_path, model_name, use_dora, tp
):
    """As PEFT does it: of a tied model at both ends, though only one has a LoRA."""
    model = tiny_model(model_name)
    other = copy.deepcopy(model.reference)
    with torch.no_grad():
        noise = torch.randn(131, model.reference.config.hidden_size)
        other.get_input_embeddings().weight.add_(noise * 0.05)
    keys = {"r": 4, "target_modules": ["embed_tokens", "v_proj"], "use_dora": use_dora}
    trained = get_peft_model(other, LoraConfig(init_lora_weights=False, **keys))
    trained.save_pretrained(tmp_path)
    group = ranks(model_name, tp, torch.float32)
    adapter = read(tmp_path, group.config)
    assert len(adapter.tables) == 1 + model.reference.config.tie_word_embeddings
    group.load(0, adapter)
    tokens = random_tokens(30, 5)
    (found,) = group.logits([(0, tokens)])
    assert error(found, by_peft(model.reference, tmp_path, tokens)) < 1e-4


@pytest.mark.parametrize("save_peft_format", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": SEVEN, "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": BOTH},
    ],
    ids=["dora", "saved"],
)
def test_what_transformers_exports_without_peft_model_is_served(
    tiny_model, ranks, tmp_path, keys, save_peft_format
):
    model = copy.deepcopy(tiny_model("llama3_biased").reference)
    model.add_adapter(LoraConfig(r=4, init_lora_weights=False, **keys))
    train(model)
    model.save_pretrained(tmp_path, save_peft_format=save_peft_format)
    group = ranks("llama3_biased", 2, torch.float32)
    group.load(0, read(tmp_path, group.config))
    tokens = random_tokens(17, 5)
    (found,) = group.logits([(0, tokens)])
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([tokens])).logits[0]
    assert error(found, expected) < 1e-4


@pytest.mark.parametrize("module", ["q_proj", "down_proj", "embed_tokens", "lm_head"])
def test_dora_on_a_weight_that_cancels_out_is_refused_by_the_rank(
    tiny_model, ranks, tmp_path, module
):
    """PEFT divides by zero there. The embedding's norms go over tokens, the others' over inputs."""
    model = copy.deepcopy(tiny_model("llama3_biased").reference)
    keys = {"r": 1, "lora_alpha": 1, "target_modules": [module], "use_dora": True}
    trained = get_peft_model(model, LoraConfig(**keys))
    weights = {n: p for n, p in trained.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in weights.items():
            if "lora_A" in name or "embedding_A" in name:
                layer = trained.get_submodule(name.partition(".lora_")[0])
                base = layer.base_layer.weight
                parameter.copy_(-(base[:, :1].T if module == "embed_tokens" else base[:1]))
            elif "lora_B" in name or "embedding_B" in name:
                parameter.zero_()[0] = 1
    trained.save_pretrained(tmp_path)
    group = ranks("llama3_biased", 1, torch.float32)
    before = group.ranks[0].bank.adapter(5)
    with pytest.raises(UnusableAdapter, match=rf"DoRA of {module} \(layer 0\): .* not finite"):
        group.load(5, read(tmp_path, group.config))
    assert group.ranks[0].bank.adapter(5) == before


def test_dora_without_the_base_models_weights_is_an_error(made, ranks):
    group = ranks("llama", 1, torch.float32)
    rank = group.ranks[0]
    bank = AdapterBank(
        rank.part, num_layers=2, num_slots=1, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(AssertionError, match="need the base model's weights"):
        bank.load(0, "dora", (1.0,), (cut(read(made("llama", "dora"), group.config), rank.part),))


def test_dora_whose_base_model_has_gone_from_the_disk_is_refused_by_the_rank(made, ranks, tmp_path):
    group = ranks("llama", 1, torch.float32)
    rank = group.ranks[0]
    bank = AdapterBank(
        rank.part,
        num_layers=2,
        num_slots=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        base=BaseWeights(tmp_path / "gone", group.config, rank.part, torch.float32),
    )
    with pytest.raises(UnusableAdapter, match="base model's weights cannot be read again"):
        bank.load(0, "dora", (1.0,), (cut(read(made("llama", "dora"), group.config), rank.part),))
    plain = read(made("llama", "rank and alpha patterns under rslora"), group.config)
    bank.load(0, plain.digest, (1.0,), (cut(plain, rank.part),))
    assert bank.adapter(0) == plain.digest
