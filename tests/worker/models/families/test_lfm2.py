"""LFM2, most of whose layers have a short convolution."""

from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.worker.models.families.battery import HybridBattery


class TestLfm2(HybridBattery):
    """See `HybridBattery`."""

    adapter = "rank 8 on all linears"

    @staticmethod
    def build() -> Lfm2ForCausalLM:
        """Return a tiny model."""
        config = Lfm2Config(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=120,
            block_multiple_of=16,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=3,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        config.head_dim = 16
        return Lfm2ForCausalLM(config)
