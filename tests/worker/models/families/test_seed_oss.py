"""Seed-OSS, of which Q, K and V have biases and the output has one of its own."""

from transformers import SeedOssConfig, SeedOssForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestSeedOss(FamilyBattery):
    """See `FamilyBattery`."""

    @staticmethod
    def build() -> SeedOssForCausalLM:
        """Return a tiny model."""
        config = SeedOssConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            attention_out_bias=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return SeedOssForCausalLM(config)
