"""Takes tokens that may not come out of rows of logits, by a bit for each token.

The masks of all rows of a step come in one copy and are applied by one launch, as vLLM and SGLang
apply XGrammar's: of a vocabulary of 128k a row's mask has 16 KiB. Nothing but what may not come is
touched.

Shapes: S rows of logits, R of them that have a mask, V vocabulary, W words of 32 bits in a mask.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.async_copy import send_columns
from kernels.gpu.constants import LAUNCH_OPTIONS

_BLOCK = 1024


def keep_allowed(
    logits: Tensor, rows: Sequence[int], allowed: Sequence[npt.NDArray[np.uint8]]
) -> None:
    """Do what `kernels.interface.Kernels.keep_allowed` does."""
    vocab = logits.shape[1]
    num_words = triton.cdiv(vocab, 32)
    masks = np.zeros((len(rows), 4 * num_words), np.uint8)
    for mask, bits in zip(masks, allowed, strict=True):
        mask[: len(bits)] = bits
    row_ids, words = send_columns(
        (np.array(rows, np.int32), masks.reshape(-1).view(np.int32)), logits.device
    )
    _keep_allowed[(len(rows), triton.cdiv(vocab, _BLOCK))](
        logits,
        row_ids,
        words,
        logits.stride(0),
        num_words,
        vocab,
        BLOCK=_BLOCK,
        **LAUNCH_OPTIONS,
    )


@triton.jit
def _keep_allowed(
    logits_ptr,  # [S, V] float32
    rows_ptr,  # [R] int32
    words_ptr,  # [R, W] int32; the first token has the lowest bit of the first word
    row_stride,
    num_words,
    vocab,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab
    words = tl.load(words_ptr + index * num_words + (tokens >> 5), mask=is_token, other=0)
    is_barred = ((words >> (tokens & 31)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + tokens, float("-inf"), mask=is_token & is_barred)
