"""Qwen3, whose heads of Q and K are normed, and whose second layer slides."""

from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.worker.models.families.battery import WindowBattery


class TestQwen3(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> Qwen3ForCausalLM:
        """Return a tiny model."""
        config = Qwen3Config(
            vocab_size=131,
            intermediate_size=90,
            num_hidden_layers=2,
            max_position_embeddings=512,
            num_attention_heads=4,
            num_key_value_heads=4,
            hidden_size=64,
            use_sliding_window=True,
            sliding_window=50,
            max_window_layers=1,
            head_dim=32,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Qwen3ForCausalLM(config)
