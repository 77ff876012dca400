"""worker.weights.mxfp4: what blocks and scales mean."""

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.worker.mxfp4_packer import dequantized, pack
from worker.weights.mxfp4 import dequantize


def test_every_byte_under_every_scale_is_what_the_specification_says() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(256, axis=0)
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(16, axis=1)
    found = dequantize(torch.tensor(blocks), torch.tensor(scales))
    expected = torch.tensor(dequantized(blocks, scales))
    assert found.dtype == torch.float32
    assert torch.equal(found.nan_to_num(7e37), expected.nan_to_num(7e37))
    assert found[255].isnan().all() and not found[:254].isnan().any()
    assert torch.equal(found[:254], found[:254].bfloat16().float())  # which rounds nothing


def test_blocks_are_numbers_to_transformers_as_to_us() -> None:
    numbers = np.random.default_rng(1).normal(size=(3, 6, 64)).astype(np.float32)
    blocks, scales = pack(numbers)
    meant = dequantized(blocks, scales)
    assert np.abs(meant - numbers).max() < 0.25 * np.abs(numbers).max()
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    for expert in range(3):
        found = dequantize(torch.tensor(blocks[expert]), torch.tensor(scales[expert]))
        assert np.array_equal(found.numpy(), meant[expert])
        assert torch.equal(found.bfloat16(), theirs[expert].T)
