"""Rotary embedding tables, computed once at load as transformers computes them.

Owns the frequencies of each rope kind; the rotation itself is a kernel.

Shapes: M positions, R features of a head that rotate.
"""

import math

import torch
from torch import Tensor

from worker.model_config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every position, each [M, R/2] float32."""
    inverse_frequencies = _inverse_frequencies(rope, rope.rotary_dim(head_dim), num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions.unsqueeze(1) * inverse_frequencies
    scale = _attention_factor(rope)
    return angles.cos() * scale, angles.sin() * scale


def _inverse_frequencies(rope: RopeConfig, rotary_dim: int, num_positions: int) -> Tensor:
    """Return how far each pair of features turns in one position, [R/2] float32 radians."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, rotary_dim)
        case "longrope":
            return 1.0 / (_longrope_factors(rope, num_positions) * rope.theta**exponents)


def _longrope_factors(rope: RopeConfig, num_positions: int) -> Tensor:
    """Return the factors [R/2] for all sequences of a server with so many positions.

    transformers looks at each sequence's length, and what a token's K is would change as the
    sequence grows; the length that sequences may have is known at the start.
    """
    is_long = num_positions > rope.original_max_position
    return torch.tensor(rope.long_factors if is_long else rope.short_factors)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow down long waves by `factor`, keep short ones, and blend between."""
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    slowed = frequencies / rope.factor
    blended = (1 - blend) * slowed + blend * frequencies
    is_long = wavelengths > rope.original_max_position / rope.low_freq_factor
    is_short = wavelengths < rope.original_max_position / rope.high_freq_factor
    return torch.where(is_long, slowed, torch.where(is_short, frequencies, blended))


def _yarn(rope: RopeConfig, frequencies: Tensor, rotary_dim: int) -> Tensor:
    """Blend from kept to slowed over the pairs between beta_fast and beta_slow turns."""

    def pair_that_turns(num_turns: float) -> float:
        ratio = rope.original_max_position / (num_turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
