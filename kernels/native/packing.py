"""Weights in the panels that linear.c and quantized_linear.c read.

Shapes: N outputs, K inputs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.huge_pages import HugePages, huge_empty
from kernels.native.op_runner import at, is_bf16
from kernels.native.ops import QuantizeGroupsOp
from kernels.native.program import Program, Step, ThreadPool
from kernels.quantized import GROUP, QuantizedWeight

PANEL = 32  # outputs


def pack_panels(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Return a weight as linear.c reads it; the caller can drop its own copy afterwards.

    Args:
        weight: [N, K] float32 or bfloat16.
        bias: [N], or None.
    """
    out_features, in_features = weight.shape
    words = _panels_of_words(weight)
    panels = huge_empty(words.nbytes).view(torch.int32).view(words.shape)
    return LinearWeight(
        panels.copy_(words),
        None if bias is None else bias.float(),
        in_features,
        out_features,
        weight.dtype,
        "panels",
    )


def quantize_groups(weight: Tensor, thread_pool: ThreadPool, *, is_coded: bool) -> QuantizedWeight:
    """Return a weight [N, K] in int4, as `kernels.quantized.quantize` does and much faster."""
    if weight.dtype != torch.bfloat16:
        weight = weight.float()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    num_outputs, num_inputs = weight.shape
    num_groups = -(-num_inputs // GROUP)
    codes = torch.empty(num_outputs, num_groups * GROUP, dtype=torch.int8)
    scales = torch.empty(num_outputs, num_groups, dtype=torch.bfloat16)
    tensors = weight, codes, scales, torch.empty_like(scales)
    counts = weight.stride(0), num_inputs, is_bf16(weight), is_coded
    op = QuantizeGroupsOp(*map(at, tensors), *counts)
    program = Program()
    program.add(thread_pool.library.op("quantize_groups"), op, tensors)
    thread_pool.run(program, Step(num_outputs))
    return QuantizedWeight("int4", codes[:, :num_inputs], scales, tensors[3])


def pack_quantized(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, memory: HugePages
) -> LinearWeight:
    """Return weights as quantized_linear.c reads them, the panels of one behind another's.

    Args:
        weights: of one shape [N, K] and one kind.
        bias: of all their outputs, the padding of each with them; or None.
        dtype: of the rows that they are multiplied with.
        memory: where the panels are to lie.
    """
    first = weights[0]
    out_features, in_features = first.codes.shape
    num_panels = -(-out_features // PANEL)
    is_int8 = first.method == "int8"
    pack = _int8_panels if is_int8 else _int4_panels
    panels: Tensor | None = None
    scales = torch.zeros(len(weights), num_panels * PANEL) if is_int8 else None
    for index, weight in enumerate(weights):
        assert weight.codes.shape == first.codes.shape, "weights of one shape"
        assert weight.is_rotated == first.is_rotated, "weights of one kind"
        packed = pack(weight)
        if panels is None:
            panels = memory.empty((len(weights), *packed.shape), packed.dtype)
        panels[index].copy_(packed)
        if scales is not None:
            scales[index, :out_features] = weight.scales
    assert panels is not None, "at least one weight"
    return LinearWeight(
        panels.flatten(0, 1),
        None if bias is None else bias.float(),
        in_features,
        out_features,
        dtype,
        "int8_panels" if is_int8 else "int4_panels",
        scales=None if scales is None else scales.flatten(),
        is_rotated=first.is_rotated,
    )


def _int8_panels(weight: QuantizedWeight) -> Tensor:
    return _panels_of_words(weight.codes)


def _int4_panels(weight: QuantizedWeight) -> Tensor:
    """Return [panels, groups, bytes] uint8, as int4_panel.h has them."""
    assert weight.offsets is not None, "a weight in int4"
    num_groups = weight.scales.shape[1]
    outputs = -weight.codes.shape[0] % PANEL
    missing = 0, num_groups * GROUP - weight.codes.shape[1], 0, outputs
    codes = F.pad(weight.codes, missing).view(torch.uint8)
    # Two steps of four inputs share bytes.
    steps = codes.view(-1, PANEL, num_groups, GROUP // 8, 2, 4).permute(4, 0, 2, 3, 1, 5)
    halves = (steps[0] | steps[1] << 4).flatten(2)
    of_groups = F.pad(torch.stack([weight.scales, weight.offsets]), (0, 0, 0, outputs))
    of_panels = of_groups.view(2, -1, PANEL, num_groups).permute(1, 3, 0, 2)
    return torch.cat([of_panels.contiguous().view(torch.uint8).flatten(2), halves], dim=2)


def _panels_of_words(weight: Tensor) -> Tensor:
    """Return [panels, words, PANEL] int32 of a weight [N, K], whose inputs fill words of 4 bytes.

    Two bfloat16, or four int8, of one output stand together.
    """
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    missing = num_panels * PANEL - out_features, -in_features % (4 // weight.itemsize)
    if any(missing):
        weight = F.pad(weight, (0, missing[1], 0, missing[0]))
    return weight.contiguous().view(torch.int32).view(num_panels, PANEL, -1).transpose(1, 2)


def move_panels(packed: LinearWeight, memory: HugePages) -> LinearWeight:
    """Return the weight with its panels in other memory."""
    data = memory.empty(tuple(packed.data.shape), packed.data.dtype)
    return replace(packed, data=data.copy_(packed.data))
