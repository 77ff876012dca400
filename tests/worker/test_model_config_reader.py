"""What `config.json` may say, in its old and new spellings, and what is refused."""

import json
import math
import os

import pytest

from worker.model_config import ModelConfig, RopeConfig
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
        ("SmolLM3ForCausalLM", {"sliding_window": 256}, None),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, None),
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


def biased(config: ModelConfig) -> list[str]:
    """Return the linears that have a bias."""
    return [linear.name for linear in config.linears if linear.has_bias]


def test_biases_and_norms_follow_the_architecture(read):
    qwen2 = read(architectures=["Qwen2ForCausalLM"])
    assert (biased(qwen2), qwen2.qk_norm) == (["q_proj", "k_proj", "v_proj"], False)
    qwen3 = read(architectures=["Qwen3ForCausalLM"])
    assert (biased(qwen3), qwen3.qk_norm) == ([], True)
    assert qwen3.head_dim == 128  # transformers' default, whatever hidden / heads is
    llama = read(attention_bias=True, mlp_bias=True)
    assert biased(llama) == [linear.name for linear in llama.linears]


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def test_each_type_of_layer_may_have_a_rope_of_its_own_in_either_spelling(read):
    olmo = {"architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 8}
    old = read(**olmo, rope_theta=7e5, rope_scaling=YARN)
    new = read(
        **olmo,
        rope_parameters={
            "full_attention": {"rope_theta": 7e5, **YARN},
            "sliding_attention": {"rope_type": "default"},
        },
    )
    assert old == new
    assert (old.rope.kind, old.rope.theta) == ("yarn", 7e5)
    assert old.sliding_rope == RopeConfig(5e5)
    assert old.sliding_layers == (0, 1, 2, 4, 5, 6)

    gemma = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read(**gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear)
    new = read(
        **gemma,
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, **linear},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    )
    assert old == new
    assert (old.rope, old.sliding_rope) == (RopeConfig(1e6, "linear", factor=8.0), RopeConfig(1e4))
    assert old.sliding_layers == (0, 1, 2, 3, 4, 6)
    assert read(**gemma, sliding_window_pattern=2).sliding_layers == (0, 2, 4, 6)


def test_longrope_is_read_under_all_its_names(read):
    phi = {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75}
    phi["original_max_position_embeddings"] = 128
    factors = {"short_factor": [1] * 6, "long_factor": [2.5] * 6}
    made = [read(**phi, rope_scaling={"type": kind, **factors}) for kind in ("su", "longrope")]
    assert made[0] == made[1]
    rope = made[0].rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("longrope", 4.0, 128)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 6, (2.5,) * 6)
    assert rope.rotary_dim(made[0].head_dim) == 12


def test_end_tokens_of_both_files_count(read):
    config = read(generation={"eos_token_id": [7, 3]}, eos_token_id=2)
    assert config.eos_token_ids == (2, 3, 7)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
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
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is not supported"),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0},
            "residual_multiplier 0.0 is not a number above 0",
        ),
        ({"architectures": ["Olmo3ForCausalLM"], "rope_parameters": YARN}, "full_attention"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": YARN}, "short_factor"),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.1},
            "partial_rotary_factor 0.1",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
            "final_logit_softcapping is not supported",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
            "hidden_act 'gelu'",
        ),
        ({"eos_token_id": 100}, "eos_token_id"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is over 65536"),
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


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Phi3"])
def test_a_model_that_classifies_has_a_head_in_place_of_lm_head(read, kind):
    changes = {"architectures": [f"{kind}ForSequenceClassification"], "pad_token_id": 3}
    config = read(**changes, tie_word_embeddings=True, id2label={"0": "a", "1": "b", "2": "c"})
    assert config.family == kind.lower()
    assert config.classifier is not None and config.classifier.labels == ("a", "b", "c")
    assert config.pad_token_id == 3
    assert not config.tie_word_embeddings  # there is nothing to tie it to
    generates = read(architectures=[f"{kind}ForCausalLM"], id2label={"0": 5})
    assert generates.classifier is None  # whose keys are of no use are not looked at
    with pytest.raises(ValueError, match=r"config\.json: id2label does not name each"):
        read(**changes, id2label={"1": "a"})


def test_a_model_of_another_kind_is_told_what_is_served(read):
    with pytest.raises(ValueError, match=r"BertForSequenceClassification is not one of .*Llama.*"):
        read(architectures=["BertForSequenceClassification"])


MOE = {"num_experts_per_tok": 2, "head_dim": 16, "num_key_value_heads": 2}
FIRST_OF_MIXTRAL = ("gate", "experts.0.w1", "experts.0.w3", "experts.0.w2")


def test_a_mixtral_is_sparse_in_all_layers_and_its_weights_add_up(read):
    config = read(architectures=["MixtralForCausalLM"], **MOE)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (8, 2, 96)
    assert experts.renormalize and experts.layers == (0, 1)
    assert config.rope.theta == 1e6 and config.rms_norm_eps == 1e-5
    names = [linear.path for linear in config.linears_of(0)]
    assert names[4:8] == [f"block_sparse_moe.{name}" for name in FIRST_OF_MIXTRAL]
    assert len(names) == 4 + 1 + 3 * 8


def test_the_sparse_layers_of_a_qwen3_are_those_that_its_steps_and_its_list_leave(read):
    qwen3 = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 7, **MOE}
    config = read(decoder_sparse_step=2, mlp_only_layers=[3], num_experts=6, **qwen3)
    assert config.experts is not None
    assert config.experts.layers == (1, 5) and not config.experts.renormalize
    assert len(config.linears_of(0)) == 7 and len(config.linears_of(1)) == 4 + 1 + 3 * 6
    assert read(num_local_experts=6, **qwen3).experts.num_experts == 6
    assert read(num_experts=0, **qwen3).experts is None
    assert read(norm_topk_prob=True, **qwen3).experts.renormalize


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 1}, "num_experts_per_tok 2 is over 1 experts"),
        ({"num_experts": 4, "num_local_experts": 5}, "num_experts and num_local_experts differ"),
        ({"num_experts": -1}, "num_experts -1"),
        ({"num_experts": 2**60}, "num_experts is over 4096"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2**60}, "is over 4096"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size 0"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is not"),
        ({"n_shared_experts": 1}, "n_shared_experts is not supported"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused_by_their_key(read, changes, told):
    with pytest.raises(ValueError, match=told):
        read(**{"architectures": ["Qwen3MoeForCausalLM"], **MOE, **changes})


GPT_OSS = {  # as gpt-oss-20b has it, but for its size
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}


def test_a_gpt_oss_is_read_as_it_is_published_and_where_keys_are_left_out(read):
    config = read(**GPT_OSS)
    assert config.rope == RopeConfig(
        1.5e5, "yarn", 32.0, original_max_position=4096, truncate=False
    )
    assert config.sliding_window == 128 and config.sliding_layers == (0,)
    assert config.has_sinks and config.rms_norm_eps == 1e-5
    assert config.experts is not None and config.experts.swiglu is not None
    experts = config.experts
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (32, 4, 96)
    assert (experts.swiglu.alpha, experts.swiglu.limit) == (1.702, 7.0)
    assert experts.layers == (0, 1) and experts.renormalize
    linears = config.linears_of(0)
    assert [one.name for one in linears[4:8]] == [
        "router",
        "experts.0.gate_proj",
        "experts.0.up_proj",
        "experts.0.down_proj",
    ]
    assert len(linears) == 4 + 1 + 3 * 32 and all(one.has_bias for one in linears)
    assert all(one.stack.is_mxfp4 for one in linears[5:])
    short = read(architectures=["GptOssForCausalLM"], num_key_value_heads=2)
    assert short.rope == config.rope and short.head_dim == 64
    assert short.sliding_window == 128 and short.sliding_layers == (0,)
    assert short.experts is not None and short.experts.num_experts == 128
    assert not any(one.stack.is_mxfp4 for one in short.linears_of(0)[5:])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8' is not supported"),
        ({"hidden_size": 80}, "hidden_size 80 is not a multiple of 32"),
        ({"intermediate_size": 100}, "intermediate_size 100 is not a multiple of 32"),
        ({"swiglu_limit": 0.0}, "swiglu_limit 0.0 is not a number above 0"),
        ({"num_local_experts": 2}, "num_experts_per_tok 4 is over 2 experts"),
        ({"num_local_experts": 2**60}, "num_experts is over 4096"),
        ({"quantization_config": "mxfp4"}, "quantization_config"),
    ],
)
def test_a_gpt_oss_that_cannot_be_computed_is_refused_by_its_key(read, changes, told):
    with pytest.raises(ValueError, match=told):
        read(**{**GPT_OSS, **changes})
