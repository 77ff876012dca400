"""The draw of `kernels.gumbel_noise.gumbel_argmax`, by C where a rough noise is enough."""

import torch
from torch import Tensor

from kernels.gumbel_noise import gumbel_argmax, gumbel_noise_at, stream_of
from kernels.native.library import CandidateSearch, Library

_MOST_NEAR = 64  # tokens whose exact noise is looked at; as a rule it is one


def gumbel_argmax_native(scores: Tensor, seed: int, position: int, library: Library) -> int:
    """Do `gumbel_argmax` with the exact noise of those few tokens that can win by a rough one.

    So the result is the same to the bit, and most of the time is saved: in float64, two logarithms
    for each token of the vocabulary take longer than all else of a draw.
    """
    scores = scores.contiguous()
    sums, ids = torch.empty_like(scores), torch.empty(_MOST_NEAR, dtype=torch.int64)
    search = CandidateSearch(
        scores.data_ptr(),
        sums.data_ptr(),
        ids.data_ptr(),
        scores.shape[0],
        _MOST_NEAR,
        stream_of(seed, position),
        0,
    )
    library.gumbel_candidates(search)
    if search.num_candidates > _MOST_NEAR:
        return gumbel_argmax(scores, seed, position)
    if search.num_candidates == 1:
        return int(ids[0])
    ids = ids[: search.num_candidates]
    return int(ids[(scores[ids] + gumbel_noise_at(seed, position, ids)).argmax()])
