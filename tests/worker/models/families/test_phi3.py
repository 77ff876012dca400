"""Phi-3: fused linears, under adapters too, heads that rotate in part, both sets of factors."""

from transformers import Phi3Config, Phi3ForCausalLM

from tests.worker.models.families.battery import WindowBattery


def tiny(original_max_position: int) -> Phi3ForCausalLM:
    """Return a tiny model of which 12 of 16 features rotate."""
    config = Phi3Config(
        vocab_size=131,
        hidden_size=96,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        original_max_position_embeddings=original_max_position,
        sliding_window=60,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Phi3ForCausalLM(config)


class TestPhi3(WindowBattery):
    """See `WindowBattery`: the server's length is not over the original one."""

    adapter = "rank 8 on all linears"

    @staticmethod
    def build() -> Phi3ForCausalLM:
        """Return a tiny model."""
        return tiny(256)


class TestPhi3Long(WindowBattery):
    """See `WindowBattery`: the server's length is over the original one, as are all prompts'."""

    adapter = "dora and ranks on fused linears"

    @staticmethod
    def build() -> Phi3ForCausalLM:
        """Return a tiny model."""
        return tiny(8)
