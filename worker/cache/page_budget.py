"""How a rank's memory for K and V is cut into pages: of all layers, or of two kinds of layers.

A row of a layer with a sliding window sees the last positions only. Such layers have pages of their
own, which sequences give back as their windows move on, if a window can move at all. Layers with
mixers have a state instead of K and V: a page for each sequence, and one for each checkpoint.

Free of torch: `deploy` does the same sums before anything starts.
"""

from dataclasses import dataclass

from worker.model_config import ModelConfig
from worker.pools import KVCacheDtype, PageCounts

_SCALE_BYTES = 2  # of a row in int8, as kernels.int8_kv has it
MOST_PAGES = 2**25  # of a pool: a scheduler takes some bytes of memory for each
BUDGETED_PAGES = 32  # of a long prompt memory is counted for a checkpoint behind every so many


@dataclass(frozen=True, slots=True)
class PageKinds:
    """The kinds of pages that a model has."""

    window: int  # positions that a row sees in layers with pages of their own; 0: there are none
    full_layers: tuple[int, ...]  # that all other pages are of
    window_layers: tuple[int, ...]
    pages_each: int  # of a sequence of the greatest length
    window_pages_each: int  # that such a sequence holds at once, between two steps
    state_layers: tuple[int, ...] = ()  # that have mixers

    def are_there(self, pages: PageCounts) -> bool:
        """Tell whether there is a page of every kind that has layers."""
        kinds = (
            (self.full_layers, pages.full),
            (self.window_layers, pages.window),
            (self.state_layers, pages.state),
        )
        return all(count > 0 for layers, count in kinds if layers)


def row_bytes(head_dim: int, item_bytes: int, kv_cache_dtype: KVCacheDtype) -> int:
    """Return what K, or V, of one head and position takes; activations have `item_bytes` each."""
    return head_dim + _SCALE_BYTES if kv_cache_dtype == "int8" else head_dim * item_bytes


def page_num_bytes(num_layers: int, num_kv_heads: int, page_size: int, row: int) -> int:
    """Return the bytes that one page takes, K and V of all its layers together."""
    return 2 * num_layers * num_kv_heads * page_size * row


def page_kinds(model: ModelConfig, page_size: int, max_model_len: int) -> PageKinds:
    """Return the kinds of pages of a model whose sequences have so many positions at most."""
    every = tuple(one for one in range(model.num_layers) if one not in model.mixer_layers)
    pages_each = -(-max_model_len // page_size)
    window = model.sliding_window or 0
    if not model.sliding_layers or window >= max_model_len:
        return PageKinds(0, every, (), pages_each, 0, model.mixer_layers)
    assert not model.mixer_layers, "no family has windows and mixers"
    full = tuple(layer for layer in every if layer not in model.sliding_layers)
    behind = max(1, -(-(window - 1) // page_size))
    return PageKinds(window, full, model.sliding_layers, pages_each, min(pages_each, behind + 2))


def cut_budget(
    num_bytes: int, kinds: PageKinds, layer_bytes: int, state_bytes: int = 0
) -> PageCounts:
    """Return how many pages fit into so many bytes, of which one takes `layer_bytes` per layer.

    A page of states takes `state_bytes`, and `_with_states` tells how many of them there are.

    Of short sequences both kinds of pages hold all positions, of long ones nearly all are full
    ones. The memory is cut so that as much of it can be in use in the one case as in the other:
    there are 1 + w / f times as many full pages as window pages, if these take w and f bytes. That
    is the cut with the least memory left unused at worst. Where sequences cannot be so long, there
    are fewer full pages; where the longest would find none, more.
    """
    full_bytes = layer_bytes * len(kinds.full_layers)
    if kinds.state_layers:
        return _with_states(num_bytes, full_bytes, state_bytes, kinds.pages_each)
    if not kinds.window:
        return PageCounts(num_bytes // full_bytes)
    window_bytes = layer_bytes * len(kinds.window_layers)
    each, window_each = kinds.pages_each, kinds.window_pages_each
    if not kinds.full_layers:
        num_window = num_bytes // window_bytes
        # More than all paths to checkpoints take, whose pages they are beside the window pages.
        paths = num_window * -(-each // max(1, window_each - 2))
        return PageCounts(min(MOST_PAGES, paths), num_window)
    longest = each * full_bytes + window_each * window_bytes
    num_window = max(
        num_bytes // (full_bytes + 2 * window_bytes), num_bytes * window_each // longest
    )
    left = num_bytes - each * full_bytes  # by the full pages of the longest sequence
    num_window = min(num_window, max(window_each, left // window_bytes))
    return PageCounts((num_bytes - num_window * window_bytes) // full_bytes, num_window)


def _with_states(num_bytes: int, full_bytes: int, state_bytes: int, each: int) -> PageCounts:
    """Return how many pages of K and V fit into so many bytes, and of states.

    Sequences of one page take two pages of states for each of K and V: their own, and a checkpoint.
    The longest take one for every `each / (2 + each / BUDGETED_PAGES)`, near to BUDGETED_PAGES if
    they are long. The memory is cut so that as much of it can be in use in the one case as in
    the other. Where the longest sequence would find no pages of K and V, there are more of these.
    """
    longest = max(1.0, each / (2 + each // BUDGETED_PAGES))
    # Pages of K and V for each of states, of which sequences of one page use a half.
    ratio = (state_bytes + full_bytes / 2) / (full_bytes + state_bytes / longest)
    num_states = int(num_bytes / (state_bytes + ratio * full_bytes))
    left = num_bytes - each * full_bytes  # by the pages of the longest sequence
    num_states = min(MOST_PAGES, max(2, min(num_states, left // state_bytes)))
    if num_states * state_bytes + full_bytes > num_bytes:
        return PageCounts(0)
    return PageCounts((num_bytes - num_states * state_bytes) // full_bytes, state=num_states)
