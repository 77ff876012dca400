"""OLMo 2 with fewer KV heads than ranks: each counts once in the norm of K."""

from transformers import Olmo2Config, Olmo2ForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestOlmo2(FamilyBattery):
    """See `FamilyBattery`."""

    @staticmethod
    def build() -> Olmo2ForCausalLM:
        """Return a tiny model."""
        config = Olmo2Config(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Olmo2ForCausalLM(config)
