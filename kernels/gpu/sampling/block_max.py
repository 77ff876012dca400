"""The first pass over rows of logits: the largest of every chunk, and of every block within it.

The size of chunks and blocks depends on nothing.

Shapes: S rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.constants import LAUNCH_OPTIONS
from kernels.gpu.sampling.gumbel_noise import NOTHING, order_key, pack_keys

CHUNK = 4096  # tokens of a program: 16 KB
SUB = tl.constexpr(32)  # tokens of a block: 128 bytes of logits
_NUM_WARPS = 4


def block_max(logits: Tensor, with_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return the packed largest of every chunk, and the key of that of every block if asked.

    Args:
        logits: [S, V] float32; rows may be strided.
        with_blocks: else the keys are [S, 0].

    Returns:
        [S, ceil(V / CHUNK)] int64 and [S, ceil(V / SUB)] int32.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab, CHUNK)
    num_blocks = triton.cdiv(vocab, SUB.value) if with_blocks else 0
    tops = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    keys = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    _chunk_max[(num_rows, num_chunks)](
        logits,
        tops,
        keys if with_blocks else None,
        logits.stride(0),
        VOCAB=vocab,
        CHUNK=CHUNK,
        num_warps=_NUM_WARPS,
        **LAUNCH_OPTIONS,
    )
    return tops, keys


@triton.jit
def _chunk_max(logits_ptr, tops_ptr, keys_ptr, stride, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + at, mask=at < VOCAB, other=float("-inf"))
    keys = order_key(logits)
    # The ids past the vocabulary lose every tie.
    tl.store(tops_ptr + row * tl.num_programs(1) + chunk, tl.max(pack_keys(keys, at)))
    if keys_ptr is not None:
        BLOCKS: tl.constexpr = (VOCAB + SUB - 1) // SUB
        block = chunk * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB)
        best_keys = tl.max(tl.reshape(keys, [CHUNK // SUB, SUB]), axis=1)
        tl.store(keys_ptr + row * BLOCKS + block, best_keys, mask=block < BLOCKS)


@triton.jit
def merged(packed_ptr, CHUNKS, CHUNKS_PADDED: tl.constexpr):
    """Return the largest of a row's packed values."""
    at = tl.arange(0, CHUNKS_PADDED)
    return tl.max(tl.load(packed_ptr + at, mask=at < CHUNKS, other=NOTHING))
