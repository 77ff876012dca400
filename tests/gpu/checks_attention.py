"""Paged attention on the device: decode and prefill against float64, and rows to the bit.

Shapes: as in tests.gpu.paged; T rows.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.gpu.attention.paged_decode import most_splits, paged_decode
from kernels.gpu.attention.paged_prefill import block_rows, cut_prefill, paged_prefill
from tests.gpu.checks import DTYPES, GATES, error_of, expect_near, expect_same, expect_untouched
from tests.gpu.paged import Heads, Paged, make_paged
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding

LLAMA, SMOL = Heads(8, 2, 128), Heads(9, 3, 64)
SHAPES = {
    "D128 group 4": LLAMA,
    "D64 group 3": SMOL,
    "D64 group 1": Heads(2, 2, 64),
    "D128 group 8": Heads(16, 2, 128),
    "D96 group 1": Heads(4, 4, 96),
    "D256 group 4": Heads(4, 1, 256),
}


def cases(place: Place) -> Iterator[Case]:
    every = [(name, dtype, 64) for name in ("D128 group 4", "D64 group 3") for dtype in DTYPES]
    sizes = ("D64 group 1", "D128 group 8", "D96 group 1", "D256 group 4")
    others = [(name, "bfloat16", 64) for name in sizes]
    pages = [("D128 group 4", "bfloat16", page) for page in (16, 32, 128)]
    for name, dtype, page in place.pick(every + others + pages, [("D64 group 3", "bfloat16", 16)]):
        args = (place, SHAPES[name], DTYPES[dtype], page)
        title = f"{dtype} {name} page {page}"
        yield f"decode {title}", lambda args=args: decode_near(*args)
        yield f"prefill {title}", lambda args=args: prefill_near(*args)
        if (dtype, page) != ("bfloat16", 64) and not place.is_dry:
            continue
        yield f"decode rows alone {title}", lambda args=args: decode_alone(*args)
        yield f"prefill in chunks {title}", lambda args=args: prefill_chunked(*args)
    for name, dtype in place.pick([*DTYPES.items()], [("bfloat16", torch.bfloat16)]):
        yield f"sinks {name}", lambda dtype=dtype: sinks_near(place, dtype)
    yield "a pool of over 2^31 elements", lambda: far_pages(place)


def decode(
    paged: Paged,
    q: Tensor,
    some: Sequence[int] | None = None,
    more: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `out` [T, HQ, D]; sequence i is row i of q. NaN where nobody is."""
    sequences = list(range(len(paged.lens))) if some is None else list(some)
    rows = torch.tensor(sequences, dtype=torch.int32, device=q.device)
    lens = torch.tensor([paged.lens[i] for i in sequences], dtype=torch.int32, device=q.device)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    longest = max(paged.lens[i] for i in sequences)
    paged_decode(
        q,
        paged.k_pages,
        paged.v_pages,
        rows,
        paged.page_table[rows.long()].contiguous(),
        lens,
        paged.heads.scale,
        out,
        max(1, most_splits(longest)) + more,
        sinks=sinks,
    )
    return out


def decode_near(place: Place, heads: Heads, dtype: torch.dtype, page: int) -> Finding:
    lens = [0, 1, page - 1, page, page + 1, 511, 512, 513, 0, 1535, 1536, 2049, 4096, 33_100]
    paged = make_paged(place, heads, page, place.pick(lens, [0, 1, page + 1, 513]), dtype)
    q = _queries(place, heads, len(paged.lens), dtype)
    out = decode(paged, q)
    present = [i for i, length in enumerate(paged.lens) if length]
    absent = [i for i, length in enumerate(paged.lens) if not length]
    expect_untouched(out[absent], "rows of nobody")
    errors = [
        expect_near(out[i : i + 1], paged.attend(q[i : i + 1], i), GATES[dtype], f"{paged.lens[i]}")
        for i in present
    ]
    return {"error": max(errors), "gate": GATES[dtype], "note": f"{len(present)} lengths"}


def decode_alone(place: Place, heads: Heads, dtype: torch.dtype, page: int) -> Finding:
    """Each row to the bit: alone, among 2, 17 and 64, turned around, and with splits to spare."""
    count = place.pick(64, 4)
    lens = place.pick([1 + 97 * i % 3000 for i in range(count)], [1, 40, 17, 530])
    paged = make_paged(place, heads, page, lens, dtype)
    q = _queries(place, heads, count, dtype)
    whole = decode(paged, q)
    expect_same(decode(paged, q, range(count - 1, -1, -1)), whole, "turned around")
    expect_same(decode(paged, q, more=3), whole, "room for more splits")
    for size in place.pick([1, 2, 17], [1, 2]):
        for first in place.pick([0, 13, 40], [1]):
            some = list(range(first, first + size))
            expect_same(decode(paged, q, some)[some], whole[some], f"{size} rows from {first}")
    return {"note": f"1, 2, 17 and {count} rows"}


def prefill(
    paged: Paged,
    q: Tensor,
    first_rows: Sequence[int],
    chunks: Sequence[tuple[int, int, int]],
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `out` of chunks (sequence, first position, end), each a call's row of its own."""
    heads = paged.heads
    blocks = cut_prefill(
        [first_rows[i] + start for i, start, _ in chunks],
        [end - start for _, start, end in chunks],
        [end for _, _, end in chunks],
        block_rows(heads.group, heads.head_dim),
    )
    tables = paged.page_table[torch.tensor([i for i, _, _ in chunks], device=q.device)]
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    paged_prefill(
        q,
        paged.k_pages,
        paged.v_pages,
        torch.tensor(blocks, dtype=torch.int32, device=q.device).reshape(-1, 4),
        tables.contiguous(),
        heads.scale,
        out,
        sinks=sinks,
    )
    return out


def prefill_near(place: Place, heads: Heads, dtype: torch.dtype, page: int) -> Finding:
    """Chunks of a few rows to a thousand, behind contexts of none to thousands."""
    real = [
        (1, 1),
        (17, 17),
        (130, 130),
        (64, 200),
        (300, 1000),
        (1, 2049),
        (1000, 1000),
        (5, 4100),
    ]
    chunks = place.pick(real, [(1, 1), (3, 20), (40, 40)])  # (rows, positions)
    paged = make_paged(place, heads, page, [length for _, length in chunks], dtype)
    starts = [sum(rows for rows, _ in chunks[:i]) + 2 for i in range(len(chunks))]
    q = _queries(place, heads, starts[-1] + chunks[-1][0] + 2, dtype)
    firsts = [s - (n - rows) for s, (rows, n) in zip(starts, chunks, strict=True)]
    out = prefill(paged, q, firsts, [(i, n - rows, n) for i, (rows, n) in enumerate(chunks)])
    expect_untouched(torch.cat((out[:2], out[-2:])), "rows of no chunk")
    errors = []
    for i, (rows, _) in enumerate(chunks):
        here = slice(starts[i], starts[i] + rows)
        errors.append(
            expect_near(out[here], paged.attend(q[here], i), GATES[dtype], f"{chunks[i]}")
        )
    return {"error": max(errors), "gate": GATES[dtype], "note": f"{len(chunks)} chunks"}


def prefill_chunked(place: Place, heads: Heads, dtype: torch.dtype, page: int) -> Finding:
    """A prompt to the bit: whole, in chunks that end anywhere, alone and beside others."""
    lens = place.pick([1500, 700, 65], [50, 20])
    paged = make_paged(place, heads, page, lens, dtype)
    starts = [sum(lens[:i]) for i in range(len(lens))]
    q = _queries(place, heads, sum(lens), dtype)
    whole = prefill(paged, q, starts, [(i, 0, n) for i, n in enumerate(lens)])
    for cuts in place.pick([(64, 128), (1, 33, 700), (511, 513, 1000, 1499)], [(7, 16)]):
        inner = [cut for cut in cuts if cut < lens[0]]
        ends = [*inner, lens[0]]
        for start, end in zip([0, *inner], ends, strict=True):
            here = slice(start, end)
            found = prefill(paged, q, starts, [(0, start, end)])
            expect_same(found[here], whole[here], f"positions {start} to {end} by themselves")
    found = prefill(paged, q, starts, [(1, 0, lens[1])])
    expect_same(found[starts[1] : starts[1] + lens[1]], whole[starts[1] :][: lens[1]], "alone")
    row = slice(lens[0] - 1, lens[0])
    as_decode = decode(paged, q[[*range(lens[0] - 1, lens[0])]].contiguous(), [0])
    return {"note": f"decode differs by {error_of(as_decode, whole[row]):.2g}"}


def sinks_near(place: Place, dtype: torch.dtype) -> Finding:
    """Decodes of one split and of many, and a prompt whole and in chunks, as gpt-oss has heads."""
    heads = Heads(64, 8, 64)
    lens = place.pick([1, 130, 512, 513, 4100], [1, 20, 530])
    paged = make_paged(place, heads, 64, lens, dtype)
    sinks = place.randn(heads.num_heads, dtype=torch.float32, scale=2.0)
    q = _queries(place, heads, len(lens), dtype)
    out = decode(paged, q, sinks=sinks)
    expect_same(decode(paged, q, [1], sinks=sinks)[1], out[1], "a decode alone")
    errors = []
    for i in range(len(lens)):
        near = paged.attend(q[i : i + 1], i, sinks=sinks)
        errors.append(expect_near(out[i : i + 1], near, GATES[dtype], f"{lens[i]}"))
    rows = _queries(place, heads, lens[1], dtype)
    whole = prefill(paged, rows, [0, 0], [(1, 0, lens[1])], sinks)
    errors.append(expect_near(whole, paged.attend(rows, 1, sinks=sinks), GATES[dtype], "a prompt"))
    cut = lens[1] // 3
    part = prefill(paged, rows, [0, 0], [(1, cut, lens[1])], sinks)
    expect_same(part[cut:], whole[cut:], "a chunk")
    return {"error": max(errors), "gate": GATES[dtype]}


def far_pages(place: Place) -> Finding:
    """Pages whose elements are numbered past 2^31."""
    heads, page = Heads(32, 8, 128), 64
    first = place.pick((1 << 31) // (8 * page * 128), 2)
    dtype = torch.bfloat16
    paged = make_paged(place, heads, page, [130, 65], dtype, first_page=first)
    q = _queries(place, heads, 2, dtype)
    out = decode(paged, q)
    errors = [expect_near(out[i : i + 1], paged.attend(q[i : i + 1], i), 5e-3) for i in range(2)]
    rows = _queries(place, heads, 130, dtype)
    found = prefill(paged, rows, [0], [(0, 0, 130)])
    errors.append(expect_near(found, paged.attend(rows, 0), 5e-3))
    return {"error": max(errors), "gate": 5e-3, "note": f"{paged.k_pages.numel():,} elements"}


def _queries(place: Place, heads: Heads, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Return q [T, HQ, D] as a view of qkv, whose other heads are NaN."""
    num_all = heads.num_heads + 2 * heads.num_kv_heads
    qkv = place.nans(num_rows, num_all, heads.head_dim, dtype=dtype)
    qkv[:, : heads.num_heads] = place.randn(num_rows, heads.num_heads, heads.head_dim, dtype=dtype)
    return qkv[:, : heads.num_heads]
