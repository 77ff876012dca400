"""LoRA in 8 bits: A and B as codes, with one scale for each lora_rank.

A lora_rank is a row of A and a column of B, whose product alone counts. So each has codes of its
own (kernels.lora.WriteCodes), and what 1 stands for in both is multiplied: A x times that product
goes into B's codes.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.lora import BLOCK_ALIGNMENT, CODED_INPUTS, CODED_RANKS, WriteCodes
from kernels.native.huge_pages import huge_empty
from kernels.quantized import MAX_INPUTS
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights


def in_int8(weights: AdapterWeights, write_codes: WriteCodes) -> AdapterWeights:
    """Return an adapter with the LoRAs of its linears in int8; embedding and head stay as they are.

    All that is new shares one storage.
    """
    loras = [lora for layer in weights.layers for lora in layer if lora is not None]
    if not loras:
        return weights
    memory = _Memory(sum(map(_num_bytes, loras)), loras[0].a.device)
    layers = tuple(
        tuple(None if lora is None else _quantized(lora, memory, write_codes) for lora in layer)
        for layer in weights.layers
    )
    return replace(weights, layers=layers)


class _Memory:
    """Memory of which parts are taken one behind the other, each from a line on."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert device.type == "cpu", "codes are a CPU's"
        self._left = huge_empty(num_bytes, is_exact=True).view(torch.int8)

    def take(self, num_bytes: int) -> Tensor:
        taken, self._left = self._left[:num_bytes], self._left[_round_up(num_bytes) :]
        return taken


def _round_up(count: int, unit: int = BLOCK_ALIGNMENT) -> int:
    return -(-count // unit) * unit


def _num_bytes(lora: LoraLayerWeights) -> int:
    """Return what `_quantized` takes of memory."""
    of_b = (_round_up(len(ranks), CODED_RANKS) * width for ranks, width, _ in _blocks(lora))
    of_a = len(lora.a) * _round_up(lora.a.shape[1], CODED_INPUTS)
    return sum(map(_round_up, (of_a, torch.float32.itemsize * len(lora.a), *of_b)))


def _blocks(lora: LoraLayerWeights) -> Sequence[tuple[range, int, int]]:
    """Return of each block of B its lora_ranks, its outputs and its first element."""
    return [
        (range(first_rank, end_rank), end - first, start)
        for first_rank, end_rank, first, end, start in lora.blocks.tolist()
    ]


def _quantized(
    lora: LoraLayerWeights, memory: _Memory, write_codes: WriteCodes
) -> LoraLayerWeights:
    assert lora.a.shape[1] <= MAX_INPUTS, f"{lora.a.shape[1]} inputs: sums have 32 bits"
    num_codes = _round_up(lora.a.shape[1], CODED_INPUTS)
    a = memory.take(len(lora.a) * num_codes).view(len(lora.a), num_codes)
    scales = memory.take(torch.float32.itemsize * len(lora.a)).view(torch.float32)
    scales.copy_(write_codes.of_a(lora.a, a))
    parts: list[Tensor] = []
    for ranks, width, start in _blocks(lora):
        block = lora.b[start : start + len(ranks) * width].view(len(ranks), width)
        parts.append(memory.take(_round_up(len(ranks), CODED_RANKS) * width))
        scales[ranks.start : ranks.stop] *= write_codes.of_b(block, parts[-1])
    first = parts[0].storage_offset()
    blocks = lora.blocks.clone()
    blocks[:, 4] = torch.tensor([part.storage_offset() - first for part in parts])
    end = parts[-1].storage_offset() - first + len(parts[-1])
    return replace(lora, a=a, b=parts[0].as_strided((end,), (1,)), blocks=blocks, scales=scales)
