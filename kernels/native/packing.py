"""Weights in the panels that linear.c and int8_linear.c read.

Shapes: N outputs, K inputs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.huge_pages import HugePages, huge_empty
from kernels.quantized import QuantizedWeight

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


def pack_int8_panels(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype, memory: HugePages
) -> LinearWeight:
    """Return weights as int8_linear.c reads them, each in panels of its own behind the others'.

    Args:
        weights: of one shape [N, K].
        bias: of all their outputs, the padding of each with them; or None.
        dtype: of the rows that they are multiplied with.
        memory: where the panels are to lie.
    """
    out_features, in_features = weights[0].codes.shape
    num_panels = -(-out_features // PANEL)
    shape = (len(weights), num_panels, -(-in_features // 4), PANEL)
    panels = memory.empty(shape, torch.int32)
    scales = torch.zeros(len(weights), num_panels * PANEL)
    for index, weight in enumerate(weights):
        assert weight.codes.shape == (out_features, in_features), "weights of one shape"
        panels[index].copy_(_panels_of_words(weight.codes))
        scales[index, :out_features] = weight.scales
    return LinearWeight(
        panels.flatten(0, 1),
        None if bias is None else bias.float(),
        in_features,
        out_features,
        dtype,
        "int8_panels",
        scales=scales.flatten(),
    )


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
