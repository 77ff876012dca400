"""The vocabulary-parallel embedding and lm_head of one rank: token ids in, logits out.

Owns how adapters change the two: by their own tables, by LoRA and by DoRA, each only in its own
rows.

Shapes: T rows, S rows that are sampled, H hidden, V vocabulary entries of this rank, R lora_rank.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.linear import LinearWeight
from kernels.lora import embedding_lora_apply, lora_apply
from worker.distributed.communicator import Communicator
from worker.lora.adapter_bank import AdaptedRows
from worker.lora.adapter_weights import AdapterEmbedding, AdapterHead
from worker.spans import Span


def embed(
    token_ids_T: Tensor,
    table_VH: Tensor,
    held: Span,
    group: Communicator,
    adapted: Sequence[AdaptedRows[AdapterEmbedding]] = (),
) -> Tensor:
    """Return the embeddings [T, H] of tokens, each looked up on the rank that holds it."""
    if group.size == 1:
        return _look_up(token_ids_T, table_VH, adapted)
    local_T = token_ids_T - held.start
    is_elsewhere_T = (local_T < 0) | (local_T >= len(held))
    x_TH = _look_up(local_T.masked_fill(is_elsewhere_T, 0), table_VH, adapted)
    return group.all_reduce(x_TH.masked_fill_(is_elsewhere_T.unsqueeze(1), 0))


def _look_up(
    local_T: Tensor, table_VH: Tensor, adapted: Sequence[AdaptedRows[AdapterEmbedding]]
) -> Tensor:
    """Return rows of this rank's part of the vocabulary as each row's adapter has them."""
    x_TH = F.embedding(local_T, table_VH)
    for rows in adapted:
        own, local, x = rows.weights, local_T[rows.start : rows.stop], x_TH[rows.start : rows.stop]
        if own.table is not None:
            x.copy_(F.embedding(local, own.table))
        if own.a_by_token is not None and own.b is not None:
            embedding_lora_apply(x, local, own.a_by_token, own.b, own.gain)
    return x_TH


def head_logits(
    x_SH: Tensor,
    sample_rows_S: Sequence[int],
    lm_head: LinearWeight,
    adapted: Sequence[AdaptedRows[AdapterHead]],
    kernels: AnyKernels,
) -> Tensor:
    """Return this rank's logits [S, V]; some rows may have another head.

    `sample_rows_S` are the rows of the batch that `x_SH` was taken from, in any order.
    """
    if not adapted:
        return kernels.linear(x_SH, lm_head)
    y_SV = torch.empty(x_SH.shape[0], lm_head.out_features, device=x_SH.device)
    own = [
        (rows.weights, [i for i, row in enumerate(sample_rows_S) if rows.start <= row < rows.stop])
        for rows in adapted
    ]
    replaced = {i for head, indices in own if head.weight is not None for i in indices}
    others = [i for i in range(len(sample_rows_S)) if i not in replaced]
    index = kernels.send(others, torch.int64, x_SH.device)
    y_SV.index_copy_(0, index, kernels.linear(x_SH.index_select(0, index), lm_head).float())
    for head, indices in own:
        if not indices:
            continue
        index = kernels.send(indices, torch.int64, x_SH.device)
        x = x_SH.index_select(0, index)
        if head.weight is None:
            y = y_SV.index_select(0, index)
        else:
            y = kernels.linear(x, head.weight).float()
        if head.lora is not None:
            lora_apply(y, x, (head.lora.segment(0, len(indices)),))
        y_SV.index_copy_(0, index, y)
    return y_SV
