"""OLMo 3, whose fourth layer sees everything and rotates by yarn."""

from transformers import Olmo3Config, Olmo3ForCausalLM

from tests.worker.models.families.battery import WindowBattery


class TestOlmo3(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> Olmo3ForCausalLM:
        """Return a tiny model."""
        config = Olmo3Config(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            sliding_window=50,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return Olmo3ForCausalLM(config)
