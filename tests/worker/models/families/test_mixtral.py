"""Mixtral, whose every layer is sparse."""

from transformers import MixtralConfig, MixtralForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestMixtral(FamilyBattery):
    """See `FamilyBattery`."""

    adapter = "attention, experts and router"
    seed = 59  # whose choice of experts hangs on no rounding: their logits are 0.02 apart

    @staticmethod
    def build() -> MixtralForCausalLM:
        """Return a tiny model."""
        config = MixtralConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=50,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            num_local_experts=5,
            num_experts_per_tok=2,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = MixtralForCausalLM(config)
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model
