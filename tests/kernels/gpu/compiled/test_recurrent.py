"""The kernels of recurrent layers as compiled: states in registers, nothing spilled."""

import pytest
import torch

from kernels.gpu.batch_metadata import StateMetadata
from kernels.gpu.recurrent.causal_conv import causal_conv, short_conv
from kernels.gpu.recurrent.gated_delta_rule import gated_delta_rule
from kernels.gpu.recurrent.gated_norm import gated_norm, gated_squares
from kernels.gpu.recurrent.selective_scan import selective_scan
from kernels.recurrent.weights import ConvWeight, DeltaWeight, ScanWeight
from tests.kernels.gpu.compiler import compiling

INT32 = torch.int32
ROWS = StateMetadata(torch.zeros(2, 4, dtype=INT32), torch.zeros(2, dtype=INT32))
# Heads, groups, head features, state features: Granite 4.0 H 350M, Falcon-H1 0.5B.
SCANS = {"Granite": (48, 1, 32, 128), "Falcon": (24, 1, 64, 128), "wide": (24, 1, 64, 256)}
# Key heads, value heads, key features, value features: Qwen3.5, Qwen3-Next.
DELTAS = {"Qwen3.5": (16, 16, 128, 128), "Qwen3-Next": (16, 32, 128, 128)}


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SCANS.values(), ids=SCANS)
def test_a_scan_keeps_its_part_of_a_state_in_registers(
    architecture: int, shape: tuple[int, int, int, int]
) -> None:
    heads, groups, dim, state = shape
    weight = ScanWeight(*(torch.empty(heads) for _ in range(3)), (0.0, float("inf")))
    with compiling(architecture) as found:
        selective_scan(
            bf16(2, heads * dim + 2 * groups * state),
            bf16(2, heads),
            weight,
            torch.empty(3, heads, state, dim),
            ROWS,
        )
    (kernel,) = found
    assert kernel.stack_bytes == 0 and kernel.num_warps == 1
    assert kernel.blocks_per_sm >= 12


@pytest.mark.parametrize("shape", DELTAS.values(), ids=DELTAS)
def test_a_delta_rule_keeps_its_part_of_a_state_in_registers(
    architecture: int, shape: tuple[int, int, int, int]
) -> None:
    key_heads, heads, key_dim, value_dim = shape
    with compiling(architecture) as found:
        gated_delta_rule(
            bf16(2, 2 * key_heads * key_dim + heads * value_dim),
            bf16(2, heads),
            bf16(2, heads),
            DeltaWeight(torch.empty(heads), torch.empty(heads)),
            torch.empty(3, heads, key_dim, value_dim),
            ROWS,
        )
    (kernel,) = found
    assert kernel.stack_bytes == 0 and kernel.num_warps == 1
    assert kernel.blocks_per_sm >= 12


@pytest.mark.parametrize(("channels", "num_taps"), [(1024, 3), (1792, 4), (6144, 4)])
def test_the_rest_spills_nothing_and_takes_half_of_an_sm_or_more(
    architecture: int, channels: int, num_taps: int
) -> None:
    weight = ConvWeight(torch.empty(num_taps, channels), torch.empty(channels))
    states = torch.empty(3, num_taps - 1, channels)
    x, gate = torch.empty(2, channels), bf16(2, channels)
    bcx, norm = bf16(2, 3 * channels), bf16(channels)
    with compiling(architecture) as found:
        causal_conv(bf16(2, channels), weight, states, ROWS, has_silu=True)
        short_conv(bcx, weight, states, ROWS, torch.bfloat16)
        gated_norm(x, gate, norm, 128, 1e-5, torch.bfloat16, gate_first=False)
        gated_norm(x, gate, norm, channels, 1e-5, torch.bfloat16, gate_first=True)
        gated_squares(x, gate, gate_first=True)
    assert len(found) == 7
    for kernel in found:
        assert kernel.stack_bytes == 0, kernel.name
        assert kernel.blocks_per_sm * kernel.num_warps >= 32, kernel.name  # of 64 warps
