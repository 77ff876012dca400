"""Rotary embedding tables, computed once at load as transformers computes them.

Owns the frequencies of each rope kind; the rotation itself is a kernel.

Shapes: M positions, D head_dim.
"""

import math

import torch
from torch import Tensor

from worker.model_config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of every position, each [M, D/2] float32."""
    inverse_frequencies = _inverse_frequencies(rope, head_dim)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions.unsqueeze(1) * inverse_frequencies
    scale = _attention_factor(rope)
    return angles.cos() * scale, angles.sin() * scale


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return how far each pair of features turns in one position, [D/2] float32 radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, head_dim)


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


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Blend from kept to slowed over the pairs between beta_fast and beta_slow turns."""

    def pair_that_turns(num_turns: float) -> float:
        ratio = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(rope.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0
