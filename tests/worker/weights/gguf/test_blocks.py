"""Codes mean to the last bit what the gguf package makes of them."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.worker.weights.gguf.writing import BLOCKS
from worker.weights.gguf.block_types import BLOCK_TYPES
from worker.weights.gguf.blocks import dequantize


def test_the_sizes_of_blocks_are_ggmls() -> None:
    for number, kind in BLOCK_TYPES.items():
        assert Type(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.num_weights, kind.num_bytes)
    assert {one.name for one in BLOCKS} == {k.name for k in BLOCK_TYPES.values() if not k.is_plain}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_any_bytes_mean_the_same_bits(kind: Type) -> None:
    ours = BLOCK_TYPES[kind]
    random = np.random.default_rng(kind)
    blocks = random.integers(0, 256, (4000, ours.num_bytes), dtype=np.uint8)
    right = gguf.dequantize(blocks, kind).reshape(4000, ours.num_weights)
    found = dequantize(ours, torch.from_numpy(blocks)).numpy()
    both_nan = np.isnan(found) & np.isnan(right)  # float16 that is none: its bits do not count
    assert ((found.view(np.int32) == right.view(np.int32)) | both_nan).all()
