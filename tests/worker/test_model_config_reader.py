"""What `config.json` may say, in its old and new spellings, and what is refused."""

import json
import math
import os

import pytest

from worker.model_config import RopeConfig
from worker.model_config_reader import read_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.fixture
def read(tmp_path):
    """Return a function that reads LLAMA with some keys changed; None drops a key."""

    def reader(generation=None, **changes):
        config = {k: v for k, v in {**LLAMA, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path)

    return reader


def test_keys_that_may_be_left_out_have_the_defaults_of_transformers(read):
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert config.sliding_window is None
    assert config.eos_token_ids == ()


def test_rope_is_read_in_its_old_and_its_new_spelling(read):
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = read(rope_theta=5e5, rope_scaling=scaling)
    older = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = read(rope_parameters={"rope_theta": 5e5, **scaling})
    assert old.rope == older.rope == new.rope == RopeConfig(5e5, "linear", 4.0)


def test_yarn_falls_back_to_the_models_own_length_and_understands_mscale(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}
    rope = read(rope_scaling=yarn).rope
    assert rope.original_max_position == 512
    assert rope.attention_factor == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1), rel=1e-12
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 256}, 256),
        ("MistralForCausalLM", {}, 4096),
        ("Qwen2ForCausalLM", {"sliding_window": 256}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 256, "use_sliding_window": True}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 1},
            256,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 256,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            256,
        ),
    ],
)
def test_a_window_counts_only_where_a_layer_slides(read, architecture, changes, window):
    assert read(architectures=[architecture], **changes).sliding_window == window


def test_biases_and_norms_follow_the_architecture(read):
    qwen2 = read(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 128  # transformers' default, whatever hidden / heads is
    llama = read(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_end_tokens_of_both_files_count(read):
    config = read(generation={"eos_token_id": [7, 3]}, eos_token_id=2)
    assert config.eos_token_ids == (2, 3, 7)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 8}, "num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": False}}, "truncate"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is over 2147483647"),
        ({"hidden_size": 10**4000}, "hidden_size is over"),
        ({"head_dim": 2**40}, "head_dim is over"),
        ({"vocab_size": 2**24 + 1}, "vocab_size is over 16777216"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window -4"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": -1,
                }
            },
            "original_max_position_embeddings -1",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale": -1.0}}, "mscale -1.0"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(read, changes, key):
    with pytest.raises(ValueError, match=key):
        read(**changes)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[]",
        b'{"architectures":["\xff"]}',
        b'{"x":' + b"[" * 100_000,
        b'{"x":"' + b"x" * 2**22 + b'"}',
    ],
    ids=["cut", "empty", "list", "no text", "deep", "large"],
)
def test_a_file_that_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json is not a regular file"):
        read_model_config(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_model_config(tmp_path)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_model_that_classifies_has_a_head_in_place_of_lm_head(read, kind):
    changes = {"architectures": [f"{kind}ForSequenceClassification"], "pad_token_id": 3}
    config = read(**changes, tie_word_embeddings=True, id2label={"0": "a", "1": "b", "2": "c"})
    assert config.architecture == kind.lower()
    assert config.classifier is not None and config.classifier.labels == ("a", "b", "c")
    assert config.pad_token_id == 3
    assert not config.tie_word_embeddings  # there is nothing to tie it to
    generates = read(architectures=[f"{kind}ForCausalLM"], id2label={"0": 5})
    assert generates.classifier is None  # whose keys are of no use are not looked at
    with pytest.raises(ValueError, match=r"config\.json: id2label does not name each"):
        read(**changes, id2label={"1": "a"})


def test_a_model_of_another_kind_is_told_what_is_served(read):
    with pytest.raises(ValueError, match=r"BertForSequenceClassification is not one of Llama.*"):
        read(architectures=["BertForSequenceClassification"])
