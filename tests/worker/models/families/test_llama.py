"""Llama with biases and the heads of SmolLM2."""

from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestLlama(FamilyBattery):
    """See `FamilyBattery`."""

    @staticmethod
    def build() -> LlamaForCausalLM:
        """Return a tiny model."""
        config = LlamaConfig(
            vocab_size=131,
            intermediate_size=90,
            num_hidden_layers=2,
            max_position_embeddings=512,
            num_attention_heads=9,
            num_key_value_heads=3,
            hidden_size=72,
            head_dim=8,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config)
