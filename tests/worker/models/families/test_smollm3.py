"""SmolLM3, of whose layers some do not rotate."""

import json

import pytest
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from tests.worker.models.families.battery import Made, WindowBattery
from worker.model_config_reader import read_model_config


class TestSmolLM3(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> SmolLM3ForCausalLM:
        """Return a tiny model whose second and fourth layers do not rotate, but slide."""
        config = SmolLM3Config(
            vocab_size=131,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=16,
            max_position_embeddings=512,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=30,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        return SmolLM3ForCausalLM(config)

    def test_which_layers_rotate_is_read_as_written_and_as_left_out(self, tiny: Made) -> None:
        file = tiny.path / "config.json"
        assert read_model_config(tiny.path).nope_layers == (1, 3)
        text = file.read_text()
        keys = json.loads(text)
        try:
            for flags, interval, nope in (
                ([0, 1, 1, 0, 7], 2, (0, 3)),
                (None, 4, (3,)),
                (None, 5, ()),
                (None, 1, (0, 1, 2, 3)),
            ):
                changed = {"no_rope_layers": flags, "no_rope_layer_interval": interval}
                file.write_text(json.dumps(keys | changed))
                assert read_model_config(tiny.path).nope_layers == nope
            for changed in ({"no_rope_layers": [1]}, {"no_rope_layer_interval": 0}):
                wrong = {"no_rope_layers": None} | changed
                file.write_text(json.dumps(keys | wrong))
                with pytest.raises(ValueError, match=next(iter(changed))):
                    read_model_config(tiny.path)
        finally:
            file.write_text(text)
