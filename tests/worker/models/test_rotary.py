"""Rotary tables against those that transformers computes."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.model_config import RopeConfig
from worker.models.rotary import rope_tables

CASES = [
    (RopeConfig(theta=1e5), {"rope_type": "default", "rope_theta": 1e5}),
    (
        RopeConfig(theta=1e4, kind="linear", factor=3.0),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    ),
    (
        RopeConfig(
            theta=5e5,
            kind="llama3",
            factor=8.0,
            original_max_position=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    (
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768),
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    (
        RopeConfig(
            theta=1e4,
            kind="yarn",
            factor=2.0,
            original_max_position=256,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=0.7,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.7,
        },
    ),
    (
        RopeConfig(
            theta=1.5e5, kind="yarn", factor=32.0, original_max_position=4096, truncate=False
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), CASES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_tables_equal_transformers(rope, parameters, head_dim):
    num_positions = 3000
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    embedding = LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    found_cos, found_sin = rope_tables(rope, head_dim, num_positions)
    assert found_cos.shape == (num_positions, head_dim // 2)
    torch.testing.assert_close(found_cos, cos[0, :, : head_dim // 2], rtol=0, atol=1e-6)
    torch.testing.assert_close(found_sin, sin[0, :, : head_dim // 2], rtol=0, atol=1e-6)
