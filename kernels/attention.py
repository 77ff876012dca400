"""Causal attention over KV pages on a CPU by torch, with grouped query heads.

For machines that cannot have kernels.native. The order in which a row's attention is summed is
fixed: its bits depend neither on its batch nor on how its prefill was chunked, nor on decode or
prefill.

1. K and V are gathered to float32 and cut into spans of fixed length.
2. Scores are products over head_dim of at least 4 rows, which all fall into one kernel class.
3. Softmax runs over whole spans; columns past the row are -inf and add exact zeros at the end.
4. p v is one product for each span, accumulated from the first span to the last.

A head's sink is a column before all others in the softmax, in a span of its own, so that no other
column moves to another lane.

Shapes: T rows, P pages, HQ / HK heads, G = HQ / HK, D head_dim; C, R, L as in attention_batch.
Pages in int8 have rows as `kernels.int8_kv` has them, of D + 2 bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import int8_kv
from kernels.attention_batch import AttentionBatch, AttentionTile, RowBlock, span_size

__all__ = ["AttentionBatch", "paged_attention", "write_kv"]

_MIN_ROWS = 4  # MKL's fp32 products add in another order with fewer


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, kv_loc: Tensor) -> None:
    """Store new K and V rows in their pages.

    Args:
        k: [T, HK, D].
        v: [T, HK, D].
        k_pages: [P, HK, page, D], changed in place.
        v_pages: [P, HK, page, D], changed in place.
        kv_loc: [T] int64, page * page_size + offset, all different.
    """
    page_size = k_pages.shape[2]
    pages, offsets = kv_loc // page_size, kv_loc % page_size
    if k_pages.dtype == torch.int8:
        k, v = int8_kv.quantize_rows(k), int8_kv.quantize_rows(v)
    k_pages[pages, :, offsets] = k
    v_pages[pages, :, offsets] = v


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale q k) v of every row over its own sequence up to its own position.

    Args:
        q: [T, HQ, D].
        k_pages: [P, HK, page, D] holding the K of every position up to the rows' own; q's dtype, or
            in int8, which is widened to it.
        v_pages: [P, HK, page, D], likewise.
        batch: where each row's sequence lies.
        scale: multiplies the scores.
        window: positions that a row sees, its own the last; None: all.
        sinks: [HQ] float32, for each head a score that joins the softmax and has no V; None: there
            is none.

    Returns:
        [T, HQ, D], q's dtype. Whatever else the pages hold, NaN included, has no effect.
    """
    assert k_pages.shape[2] == batch.page_size, "the batch was built for another page size"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    span = span_size(batch.page_size)
    for tile in batch.tiles():
        k_tile = _gather(k_pages, tile, q.dtype)
        v_tile = _gather(v_pages, tile, q.dtype)
        # p is 0 in these columns, but 0 * NaN is not.
        v_tile[:, :, tile.num_filled :].masked_fill_(tile.stale, 0.0)
        for block in tile.blocks:
            rows = q.index_select(0, block.rows)
            attended = _attend(rows, k_tile, v_tile, block, scale, span, window, sinks)
            out.index_copy_(0, block.rows, attended)
    return out


def _gather(pool: Tensor, tile: AttentionTile, dtype: torch.dtype) -> Tensor:
    """Return the tile's positions of a pool as [C, HK, L, D] float32; int8 is `dtype` first."""
    num_sequences, num_pages = tile.pages.shape
    gathered = pool.index_select(0, tile.pages.flatten())
    if pool.dtype == torch.int8:
        gathered = int8_kv.dequantize_rows(gathered, dtype)
    _, num_kv_heads, page_size, head_dim = gathered.shape
    gathered = gathered.view(num_sequences, num_pages, num_kv_heads, page_size, head_dim)
    gathered = gathered.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    gathered = gathered.reshape(num_sequences, num_kv_heads, num_pages * page_size, head_dim)
    return gathered.contiguous()  # the reshape of one-position pages is a view


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: RowBlock,
    scale: float,
    span: int,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of one block of rows [C * R, HQ, D] over K and V [C, HK, L, D]."""
    num_sequences, num_kv_heads, _, head_dim = k.shape
    num_heads, rows_each = q.shape[1], block.rows_each
    group = num_heads // num_kv_heads
    num_matrices, matrix_rows = num_sequences * num_kv_heads, rows_each * group
    # [C, R, HK, G, D] -> [C * HK, R * G, D]
    queries = q.view(num_sequences, rows_each, num_kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(num_matrices, matrix_rows, head_dim).float() * scale
    if matrix_rows < _MIN_ROWS:
        queries = F.pad(queries, (0, 0, 0, _MIN_ROWS - matrix_rows))
    keys = k.view(num_matrices, -1, head_dim)[:, : block.num_columns]
    values = v.view(num_matrices, -1, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    hidden_scores = scores[:, :matrix_rows, block.num_visible :]
    hidden_scores.view(num_sequences, num_kv_heads, rows_each, group, -1).masked_fill_(
        block.hidden, -torch.inf
    )
    if window is not None:
        passed = torch.arange(block.num_columns) <= block.positions.unsqueeze(-1) - window
        scores[:, :matrix_rows].view(
            num_sequences, num_kv_heads, rows_each, group, -1
        ).masked_fill_(passed.view(num_sequences, 1, rows_each, 1, -1), -torch.inf)
    if sinks is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        columns = scores.new_full((*scores.shape[:2], span), -torch.inf)
        columns[:, :matrix_rows, 0].view(num_sequences, num_kv_heads, rows_each, group).copy_(
            sinks.view(num_kv_heads, 1, group)
        )
        probabilities = torch.softmax(torch.cat((columns, scores), dim=-1), dim=-1)[:, :, span:]
    out = torch.zeros_like(queries)
    for start in range(0, block.num_columns, span):
        stop = start + span
        out.baddbmm_(probabilities[:, :, start:stop], values[:, start:stop])
    out = out[:, :matrix_rows].view(num_sequences, num_kv_heads, rows_each, group, head_dim)
    return out.transpose(1, 2).reshape(-1, num_heads, head_dim).to(q.dtype)
