"""gpt-oss: a layer that slides, one that sees all and one that slides; 8 query heads over 2."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.battery import FamilyBattery, Made
from tests.worker.mxfp4_packer import dequantized, pack
from tests.worker.peft_adapters import by_peft, error, read

STACKS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="class")
def checkpoints(tiny: Made, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model in MXFP4, and one of the numbers that are meant."""
    quantized, plain = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain"))
    shutil.copy(tiny.path / "config.json", plain)
    tensors = load_file(tiny.path / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        blocks, scales = pack(packed.pop(name).transpose(1, 2).contiguous().numpy())
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = map(torch.tensor, (blocks, scales))
        tensors[name] = torch.tensor(dequantized(blocks, scales)).transpose(1, 2).contiguous()
    for path, own in ((plain, tensors), (quantized, packed)):
        save_file(own, path / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    }
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, plain


class TestGptOss(FamilyBattery):
    """See `FamilyBattery`."""

    adapter = "attention, stacked experts and router"
    seed = 589  # whose choice of experts hangs on no rounding, with the products of any kind of CPU

    @staticmethod
    def build(intermediate_size: int = 96) -> GptOssForCausalLM:
        """Return a tiny model."""
        config = GptOssConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=intermediate_size,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            sliding_window=50,
            num_local_experts=5,
            num_experts_per_tok=2,
            swiglu_limit=1.5,  # which tiny models reach as well
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = GptOssForCausalLM(config)
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model

    @pytest.mark.parametrize("tp", [1, 2, 5])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_model_in_mxfp4_is_one_of_the_numbers_that_are_meant(
        self, checkpoints: tuple[Path, Path], dtype: str, tp: int
    ) -> None:
        """Also where a rank's part of an expert begins inside a block."""
        tokens = random_tokens(40, 1)
        found = []
        for path in checkpoints:
            group = LogitRanks(path, tp, getattr(torch, dtype))
            try:
                found += group.logits([(None, tokens)])
            finally:
                group.close()
        assert torch.equal(*found)
        if dtype == "float32":
            theirs = GptOssForCausalLM.from_pretrained(checkpoints[1], attn_implementation="eager")
            with torch.inference_mode():
                assert error(found[0], theirs(torch.tensor([tokens])).logits[0]) < 1e-4

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_an_adapter_names_experts_by_the_ends_of_their_paths(
        self, tiny: Made, checkpoints: tuple[Path, Path]
    ) -> None:
        """The same adapter fits a model in MXFP4."""
        group = LogitRanks(checkpoints[0], 2, torch.float32)
        try:
            adapter = read(tiny.adapter, group.config)
            group.load(0, adapter)
            tokens = random_tokens(40, 1)
            (found,) = group.logits([(0, tokens)])
        finally:
            group.close()
        assert adapter.module_names == (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "router",
            "experts.*.gate_proj",
            "experts.*.up_proj",
            "experts.*.down_proj",
        )
        downs = {one.layer for one in adapter.modules if one.module.endswith("down_proj")}
        assert downs == {1}
        theirs = GptOssForCausalLM.from_pretrained(checkpoints[1], attn_implementation="eager")
        theirs.set_experts_implementation("eager")
        assert error(found, by_peft(theirs, tiny.adapter, tokens)) < 1e-4
