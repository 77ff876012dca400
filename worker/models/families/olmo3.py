"""OLMo 3 (transformers.models.olmo3): OLMo 2 of which three layers in four slide.

Only the fourth has a rotary embedding for long contexts.
"""

from dataclasses import replace

from worker.model_config import ModelConfig
from worker.models.config_file import (
    ConfigFile,
    dense_config,
    require,
    ropes_by_type,
    with_window,
)
from worker.models.families.olmo2 import BEHIND_BLOCKS
from worker.models.family import Family

_THETA = 500_000.0


class _File(ConfigFile):
    """`config.json` as written."""

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    use_sliding_window: bool = True


def _read(file: _File) -> ModelConfig:
    require(file.sliding_window is not None, "sliding_window is missing")
    # transformers takes `rope_theta`, which the file has beside `rope_scaling`, for full layers.
    full, sliding = ropes_by_type(file, full_theta=file.rope_theta or _THETA, sliding_theta=_THETA)
    bias = file.attention_bias
    config = replace(
        dense_config(file, qkv_bias=bias, o_bias=bias, qk_norm=True, rope=full),
        norms=BEHIND_BLOCKS,
        qk_norm_is_wide=True,
        sliding_rope=sliding,
    )
    return with_window(config, file, slides=lambda layer: (layer + 1) % 4 != 0)


FAMILY = Family(
    name="olmo3",
    causal_lm="Olmo3ForCausalLM",
    classifier="Olmo3ForSequenceClassification",
    file=_File,
    read=_read,
)
