"""Times of paged attention at the shape of Llama-3.1-8B, beside torch's attention.

Torch's has its K and V contiguous and of equal lengths: it does less.

Shapes: S sequences, HQ / HK heads, D head_dim, P pages.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kernels.gpu.attention.paged_decode import most_splits, paged_decode
from kernels.gpu.attention.paged_prefill import block_rows, cut_prefill, paged_prefill
from tests.gpu.bench import Beside, line, matmul_floor, read_floor
from tests.gpu.ceilings import ceilings
from tests.gpu.paged import Heads, filled_pages
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding
from tests.gpu.timing import Call, num_sets, time_calls

_HEADS = Heads(32, 8, 128)
_PAGE = 64
_BF16 = torch.bfloat16


def cases(place: Place) -> Iterator[Case]:
    yield "ceilings", lambda: measured_ceilings(place)
    for lens, goal in (([2048] * 64, 0.85), ([4096] * 8, 0.75), ([32_768], 0.75)):
        lens = place.pick(lens, [40])
        title = f"decode {len(lens)} x {lens[0]:,}"
        yield title, lambda lens=lens, goal=goal: decode(place, lens, at_least=goal)
    yield "decode 1 x 2,048", lambda: decode(place, place.pick([2048], [20]), at_most_us=10.0)
    yield "decode 64 ragged 128 to 16k", lambda: ragged(place)
    yield "prefill 8,192", lambda: prefill(place, *place.pick((8192, 8192), (20, 20)), 0.55)
    yield "prefill 512 at 8,192", lambda: prefill(place, *place.pick((512, 8192), (5, 20)), 0.45)


def measured_ceilings(place: Place) -> Finding:
    found = ceilings(place)
    return {
        "us": found.launch * 1e6,
        "beside": f"an empty kernel; copy {found.copy / 1e12:.3f} TB/s, read "
        f"{found.read / 1e12:.3f} TB/s, bfloat16 8192^3 {found.matmul / 1e12:.0f} TFLOP/s",
        "copy": found.copy,
        "read": found.read,
        "matmul": found.matmul,
    }


def decode(
    place: Place,
    lens: Sequence[int],
    *,
    at_least: float | None = None,
    at_most_us: float | None = None,
) -> Finding:
    num_bytes = _kv_bytes(lens)
    count = place.pick(num_sets(num_bytes), 1)
    calls = [_decode_call(place, lens) for _ in range(count)]
    beside = {"sdpa": lambda: [_sdpa_decode(place, len(lens), lens[0]) for _ in range(count)]}
    floor = read_floor(place, num_bytes)
    return line(place, calls, floor, at_least=at_least, at_most_us=at_most_us, beside=beside)


def ragged(place: Place) -> Finding:
    """A few long sequences among many short ones, and as many positions in equal parts."""
    real = [int(128 * 128 ** ((i / 63) ** 2)) for i in range(64)]
    lens = place.pick(real, [3, 40])
    equal = [sum(lens) // len(lens)] * len(lens)
    num_bytes = _kv_bytes(lens)
    count = place.pick(num_sets(num_bytes), 1)
    found = line(
        place,
        [_decode_call(place, lens) for _ in range(count)],
        read_floor(place, num_bytes),
        at_least=0.75,
    )
    other = time_calls(place, [_decode_call(place, equal) for _ in range(count)]).median * 1e6
    ratio = found["us"] / other
    found["met"] = found["met"] and ratio <= 1.2
    found["goal"] += ", <= 1.2x equal"
    found["beside"] = f"{len(equal)} x {equal[0]:,}: {other:.4g} us, so {ratio:.3g}x"
    return found


def prefill(place: Place, num_rows: int, length: int, goal: float) -> Finding:
    heads = _HEADS
    operations = (
        4 * heads.num_heads * heads.head_dim * (num_rows * length - num_rows * (num_rows - 1) / 2)
    )
    calls = [_prefill_call(place, num_rows, length) for _ in range(place.pick(2, 1))]
    beside: Beside = {
        "sdpa": lambda: [_sdpa_prefill(place, num_rows, length)],
        "varlen_attn": lambda: [_varlen_prefill(place, num_rows, length)],
    }
    return line(place, calls, matmul_floor(place, operations), at_least=goal, beside=beside)


def _kv_bytes(lens: Sequence[int]) -> int:
    return 2 * sum(lens) * _HEADS.num_kv_heads * _HEADS.head_dim * 2


def _pool(place: Place, lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (K pages, V pages, page table) of sequences whose pages lie anywhere."""
    counts = [-(-length // _PAGE) for length in lens]
    k, v = filled_pages(place, _HEADS, _PAGE, sum(counts))
    order = torch.randperm(sum(counts)).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count] + [0] * (max(counts) - count))
        order = order[count:]
    return k, v, place.int32(tables)


def _decode_call(place: Place, lens: Sequence[int]) -> Call:
    k, v, page_table = _pool(place, lens)
    q = place.randn(len(lens), _HEADS.num_heads, _HEADS.head_dim, dtype=_BF16)
    rows, context_lens = place.int32(list(range(len(lens)))), place.int32(list(lens))
    out, most = torch.empty_like(q), most_splits(max(lens))

    def call() -> None:
        paged_decode(q, k, v, rows, page_table, context_lens, _HEADS.scale, out, most)

    return call


def _prefill_call(place: Place, num_rows: int, length: int) -> Call:
    k, v, page_table = _pool(place, [length])
    q = place.randn(num_rows, _HEADS.num_heads, _HEADS.head_dim, dtype=_BF16)
    rows_each = block_rows(_HEADS.group, _HEADS.head_dim)
    blocks = place.int32(cut_prefill([0], [num_rows], [length], rows_each))
    out = torch.empty_like(q)

    def call() -> None:
        paged_prefill(q, k, v, blocks, page_table, _HEADS.scale, out)

    return call


def _contiguous(place: Place, count: int, num_rows: int, length: int) -> tuple[Tensor, ...]:
    """Return q, k, v [count, heads, rows or length, D]."""
    shapes = ((_HEADS.num_heads, num_rows), *[(_HEADS.num_kv_heads, length)] * 2)
    return tuple(place.randn(count, *shape, _HEADS.head_dim, dtype=_BF16) for shape in shapes)


def _sdpa_decode(place: Place, count: int, length: int) -> Call:
    q, k, v = _contiguous(place, count, 1, length)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _sdpa_prefill(place: Place, num_rows: int, length: int) -> Call:
    q, k, v = _contiguous(place, 1, num_rows, length)
    if num_rows == length:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = causal_lower_right(num_rows, length)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _varlen_prefill(place: Place, num_rows: int, length: int) -> Call:
    """FlashAttention as torch brings it; it has as many KV heads as query heads."""
    from torch.nn.attention.varlen import varlen_attn

    size = (_HEADS.num_heads, _HEADS.head_dim)
    q = place.randn(num_rows, *size, dtype=_BF16)
    k, v = (place.randn(length, *size, dtype=_BF16) for _ in range(2))
    ends_q, ends_k = place.int32([0, num_rows]), place.int32([0, length])
    # Torch 2.10 says causal by a flag, its successors by a window that ends at the row itself.
    is_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if is_flag else {"window_size": (-1, 0)}
    return lambda: varlen_attn(q, k, v, ends_q, ends_k, num_rows, length, **causal)
