"""Weights in the panels that linear.c reads.

Shapes: N outputs, K inputs.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import LinearWeight
from kernels.native.huge_pages import HugePages, huge_empty

PANEL = 32  # outputs


def pack_panels(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Return a weight as linear.c reads it; the caller can drop its own copy afterwards.

    Args:
        weight: [N, K] float32 or bfloat16.
        bias: [N], or None.
    """
    out_features, in_features = weight.shape
    per_word = 4 // weight.itemsize  # two bfloat16 of one output stand together
    num_panels = -(-out_features // PANEL)
    missing = num_panels * PANEL - out_features, -in_features % per_word
    if any(missing):
        weight = F.pad(weight, (0, missing[1], 0, missing[0]))
    words = weight.contiguous().view(torch.int32).view(num_panels, PANEL, -1).transpose(1, 2)
    panels = huge_empty(words.nbytes).view(torch.int32).view(words.shape)
    return LinearWeight(
        panels.copy_(words),
        None if bias is None else bias.float(),
        in_features,
        out_features,
        weight.dtype,
        "panels",
    )


def move_panels(packed: LinearWeight, memory: HugePages) -> LinearWeight:
    """Return the weight with its panels in other memory."""
    data = memory.empty(tuple(packed.data.shape), packed.data.dtype)
    return replace(packed, data=data.copy_(packed.data))
