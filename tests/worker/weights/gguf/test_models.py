"""Models in GGUF files give the logits of what their tensors mean, whatever they lie in."""

import dataclasses
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import by_peft, error, make_adapter_dir, read
from tests.worker.weights.gguf.tiny_models import KINDS, build
from tests.worker.weights.gguf.writing import TYPES, write_model
from worker.model_config_reader import read_model_config
from worker.spans import Span
from worker.weights.checkpoint_files import check_checkpoint
from worker.weights.gguf import checkpoint as gguf_checkpoint
from worker.weights.gguf.checkpoint import GgufCheckpoint

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def wide() -> PreTrainedModel:
    """A Llama whose rows are whole blocks of every type, though not those of each rank."""
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.08)
    return model


def logits(path: Path, tp: int, tokens: tuple[int, ...]) -> torch.Tensor:
    group = LogitRanks(path, tp, torch.float32)
    try:
        (found,) = group.logits([(None, tokens)])
    finally:
        group.close()
    return found


def meaning(model: PreTrainedModel, meant: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Give a model the weights that a file means."""
    missing, unexpected = model.load_state_dict(meant, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


# One number of ranks for each type is enough for the quick run.
CASES = [
    pytest.param(kind, tp, marks=() if index % 3 + 1 == tp else pytest.mark.slow)
    for index, kind in enumerate(TYPES)
    for tp in (1, 2, 3)
]


@pytest.mark.parametrize(("kind", "tp"), CASES)
def test_logits_are_those_of_what_the_codes_mean(
    wide: PreTrainedModel, kind: Type, tp: int, tmp_path: Path
) -> None:
    meaning(wide, write_model(tmp_path / "m.gguf", wide, "llama", kind))
    tokens = random_tokens(40, 3)
    with torch.inference_mode():
        right = wide(torch.tensor([tokens])).logits[0]
    assert error(logits(tmp_path / "m.gguf", tp, tokens), right) < TOLERANCE


@pytest.mark.parametrize("architecture", list(KINDS))
def test_each_architecture_is_the_model_that_it_was_made_of(
    architecture: str, tmp_path: Path
) -> None:
    model, path = build(architecture), tmp_path / "m.gguf"
    model.save_pretrained(tmp_path / "directory")
    meant = write_model(path, model, architecture, Type.Q8_0)
    found, right = read_model_config(path), read_model_config(tmp_path / "directory")
    assert found.quantization is not None and found.quantization.method == "gguf"
    same = {"quantization": None, "dtype": "", "rms_norm_eps": right.rms_norm_eps}
    same |= {"rope": right.rope} if found.rope.kind == "llama3" else {}
    assert dataclasses.replace(found, **same) == dataclasses.replace(right, **same)
    check_checkpoint(path, found)
    tokens = random_tokens(60, 3)
    with torch.inference_mode():
        expected = meaning(model, meant)(torch.tensor([tokens])).logits[0]
    assert error(logits(path, 2, tokens), expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["rank 8 on every linear", "dora", "lora on both ends"])
def test_adapters_are_added_to_what_the_codes_mean(
    wide: PreTrainedModel, kind: str, tmp_path: Path
) -> None:
    path, adapter = tmp_path / "m.gguf", tmp_path / "adapter"
    meaning(wide, write_model(path, wide, "llama", Type.Q4_K))
    make_adapter_dir(wide, kind, adapter)
    tokens = random_tokens(40, 3)
    group = LogitRanks(path, 2, torch.float32)
    try:
        group.load(0, read(adapter, group.config))
        (found,) = group.logits([(0, tokens)])
    finally:
        group.close()
    assert error(found, by_peft(wide, adapter, tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", [Type.Q5_1, Type.Q6_K, Type.F16], ids=lambda kind: kind.name)
def test_weights_are_the_same_in_whatever_pieces_they_are_read(
    wide: PreTrainedModel, kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    meant = write_model(path, wide, "llama", kind)
    config = read_model_config(path)
    with GgufCheckpoint(path, config, torch.float32) as checkpoint:
        for module in ("self_attn.q_proj", "mlp.down_proj"):
            whole = meant[name := f"model.layers.1.{module}.weight"]
            for rows, columns, step in (
                (Span(0, 256), Span(0, whole.shape[1]), 1),
                (Span(13, 201), Span(7, 130), 3 * whole.shape[1]),
                (Span(70, 71), Span(255, 256), 2**20),
            ):
                monkeypatch.setattr(gguf_checkpoint, "WIDENED_AT_ONCE", step)
                found = checkpoint.read(name, tuple(whole.shape), rows, columns)
                right = whole[rows.start : rows.stop, columns.start : columns.stop]
                assert torch.equal(found.float(), right)


def test_a_model_in_several_files_is_the_same(wide: PreTrainedModel, tmp_path: Path) -> None:
    write_model(tmp_path / "one.gguf", wide, "llama", Type.Q4_0)
    write_model(tmp_path / "m.gguf", wide, "llama", Type.Q4_0, split_max_tensors=5)
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert len(others) == 3
    tokens = random_tokens(40, 3)
    assert torch.equal(logits(first, 1, tokens), logits(tmp_path / "one.gguf", 1, tokens))
    content = others[1].read_bytes()
    others[1].unlink()
    with pytest.raises(FileNotFoundError, match=others[1].name):
        read_model_config(first)
    others[1].write_bytes(others[0].read_bytes())
    with pytest.raises(ValueError, match=f"{others[1].name}: split.no and split.count are"):
        read_model_config(first)
    others[1].write_bytes(content)
    with pytest.raises(ValueError, match="name the first of its files, m-00001-of-00004"):
        read_model_config(others[0])
