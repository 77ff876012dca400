"""Log-probabilities of rows on a GPU, and the best tokens of each, without a look at any number.

How many tokens are tied with the last of the best is not known before it is counted; so here no two
tokens are equal: value and id are one integer, as in kernels.gpu.sampling.gumbel_noise. Knows
nothing of who asks. Torch alone, no kernels of its own: few rows ask.

Shapes: S rows of logits, R of them that are asked for, V vocabulary.
"""

import torch
from torch import Tensor

_ROWS_AT_ONCE = 16  # each takes 16 bytes for a token of the vocabulary meanwhile
_MAX_INT = 0x7FFFFFFF


def token_logprobs(
    logits: Tensor, rows: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `kernels.interface.Kernels.token_logprobs` does.

    Args:
        logits: [S, V] float32.
        rows: [R] int64; at least one.
        token_ids: [S] int64.
        count: of the best tokens of every row.

    Returns:
        [R] float32, [R, count] int64 and [R, count] float32.
    """
    count = min(count, logits.shape[1])
    parts = [
        _of_rows(logits.index_select(0, some), token_ids.index_select(0, some), count)
        for some in rows.split(_ROWS_AT_ONCE)
    ]
    chosen, best_ids, best = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return chosen, best_ids, best


def _of_rows(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    bits = logprobs.view(torch.int32)
    keys = bits ^ ((bits >> 31) & _MAX_INT)  # in the order of the values
    numbers = torch.arange(logprobs.shape[1], device=logprobs.device)
    packed = (keys.to(torch.int64) << 32) + (_MAX_INT - numbers)  # of equals, the lower id wins
    best_ids = _MAX_INT - (packed.topk(count).values & 0xFFFFFFFF)
    return chosen, best_ids, logprobs.gather(1, best_ids)
