"""The kernels of experts as compiled: on tensor cores of one kind, nothing spilled."""

import re

import pytest
import torch

from kernels.experts import ExpertsWeight, RoutedRows, Routing
from kernels.gpu.experts.grouped_linear import grouped_linear
from kernels.gpu.experts.pair_tiles import cut_pair_tiles
from kernels.gpu.experts.routing import route
from kernels.gpu.experts.unpermute import unpermute
from kernels.linear import LinearWeight
from tests.kernels.gpu.compiler import SHARED_LIMIT, compiling

FAMILY = {80: "HMMA.16816.F32.BF16", 90: "HGMMA.64x", 100: "UTCHMMA"}
# Experts, K and N: gate_up of Mixtral 8x7B and of Qwen3-30B-A3B.
MIXTRAL, QWEN3 = (8, 4096, 28672), (128, 2048, 1536)


def routed_rows(num_rows: int, top_k: int, num_experts: int) -> RoutedRows:
    int32 = torch.int32
    return RoutedRows(
        torch.empty(num_rows, top_k),
        torch.empty(num_rows, top_k, dtype=int32),
        torch.empty(num_rows * top_k, dtype=int32),
        torch.empty(num_experts + 1, dtype=int32),
    )


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_of_one_family_of_instructions_for_any_number_of_rows(
    architecture: int, shape: tuple[int, int, int], *, has_bias: bool
) -> None:
    num_experts, inputs, outputs = shape
    data = torch.empty(num_experts * outputs, inputs, dtype=torch.bfloat16)
    bias = torch.empty(num_experts * outputs, dtype=torch.bfloat16) if has_bias else None
    linear = LinearWeight(data, bias, inputs, num_experts * outputs, data.dtype)
    weight = ExpertsWeight((linear,), num_experts, inputs, outputs, data.dtype)
    for num_pairs in (8, 300 * num_experts):
        x = torch.empty(num_pairs, inputs, dtype=torch.bfloat16)
        with compiling(architecture) as found:
            grouped_linear(x, weight, routed_rows(num_pairs // 2, 2, num_experts))
        (kernel,) = found
        used = set(re.findall(r"\b((?:HMMA|HGMMA|UTC\w*MMA)[\w.]*)", kernel.sass))
        assert used and all(one.startswith(FAMILY[architecture]) for one in used)
        assert kernel.stack_bytes == 0 and kernel.shared_bytes <= SHARED_LIMIT[architecture]


@pytest.mark.parametrize(("num_logits", "top_k"), [(8, 2), (128, 8), (32, 4)])
def test_the_rest_spills_nothing(architecture: int, num_logits: int, top_k: int) -> None:
    with compiling(architecture) as found:
        routed = route(torch.empty(40, num_logits), Routing(top_k, True, num_logits))
        y, start = (torch.empty(n, 2048, dtype=torch.bfloat16) for n in (40 * top_k, 40))
        unpermute(y, routed, start, torch.empty(40, 1, dtype=torch.bfloat16))
        cut_pair_tiles(torch.empty(40, dtype=torch.int32), routed)
    assert len(found) == 4
    assert all(kernel.stack_bytes == 0 for kernel in found)
