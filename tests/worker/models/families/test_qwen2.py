"""Qwen2, of which Q, K and V have biases."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestQwen2(FamilyBattery):
    """See `FamilyBattery`."""

    @staticmethod
    def build() -> Qwen2ForCausalLM:
        """Return a tiny model."""
        config = Qwen2Config(
            vocab_size=131,
            intermediate_size=90,
            num_hidden_layers=2,
            max_position_embeddings=512,
            num_attention_heads=6,
            num_key_value_heads=2,
            hidden_size=48,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Qwen2ForCausalLM(config)
