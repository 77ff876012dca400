"""Qwen3, sparse: a layer of experts, one with an MLP, and another of experts."""

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.worker.models.families.battery import FamilyBattery


class TestQwen3Moe(FamilyBattery):
    """See `FamilyBattery`."""

    adapter = "experts as modules"
    seed = 76  # whose choice of experts hangs on no rounding: their logits are 0.02 apart

    @staticmethod
    def build() -> Qwen3MoeForCausalLM:
        """Return a tiny model."""
        config = Qwen3MoeConfig(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=90,
            moe_intermediate_size=31,
            num_hidden_layers=3,
            mlp_only_layers=[1],
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            num_experts=7,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = Qwen3MoeForCausalLM(config)
        model.set_experts_implementation("eager")  # others want widths that divide by 4
        return model
