"""Mistral with a window that prompts are longer than."""

from transformers import MistralConfig, MistralForCausalLM

from tests.worker.models.families.battery import WindowBattery


class TestMistral(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> MistralForCausalLM:
        """Return a tiny model."""
        config = MistralConfig(
            vocab_size=131,
            intermediate_size=90,
            num_hidden_layers=2,
            max_position_embeddings=512,
            num_attention_heads=8,
            num_key_value_heads=4,
            hidden_size=64,
            sliding_window=40,
            bos_token_id=None,
            eos_token_id=None,
        )
        return MistralForCausalLM(config)
