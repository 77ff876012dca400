"""The sizes of the CUDA graphs of decodes: rows, positions of contexts, and stacked lora_ranks.

Free of torch and Triton: who tells beforehand what graphs take imports it, too.
"""

# Rows of a graph; larger batches run by themselves. Tiles of products have up to 128 rows.
CAPTURE_SIZES: tuple[int, ...] = (
    *(1, 2, 4),
    *range(8, 33, 8),
    *range(48, 129, 16),
    *(192, 256, 384, 512),
)
# Stacked lora_ranks of a graph: three modules of 16 that are fused have 48.
CAPTURE_RANKS = (0, 64, 256)
# Positions of the contexts of a graph. Up to the first, and over twice the second, contexts have as
# many splits, and only page tables become wider.
_CONTEXTS, _CONTEXT_GROWTH = (4096, 16384), 8


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the rows of the graphs of a rank on which at most so many sequences run."""
    smaller = sum(size < max_num_seqs for size in CAPTURE_SIZES)
    return CAPTURE_SIZES[: smaller + 1]


def capture_contexts(max_model_len: int) -> tuple[int, ...]:
    """Return the positions of the contexts of graphs, the last for all that a sequence may have."""
    contexts = [_CONTEXTS[0]]
    while contexts[-1] < max_model_len:
        grown = _CONTEXT_GROWTH * contexts[-1]
        contexts.append(next((one for one in _CONTEXTS if one > contexts[-1]), grown))
    return tuple(contexts)
