"""Granite, whose multipliers are no powers of two here."""

from transformers import GraniteConfig, GraniteForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestGranite(FamilyBattery):
    """See `FamilyBattery`."""

    @staticmethod
    def build() -> GraniteForCausalLM:
        """Return a tiny model with all four multipliers."""
        config = GraniteConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            attention_bias=True,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.3,
            logits_scaling=6.0,
        )
        return GraniteForCausalLM(config)
