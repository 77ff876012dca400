"""Gemma 3 with one KV head, of which the second layer sees everything."""

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.worker.models.families.battery import WindowBattery


class TestGemma3(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> Gemma3ForCausalLM:
        """Return a tiny model."""
        config = Gemma3TextConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=512,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=50,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Gemma3ForCausalLM(config)
