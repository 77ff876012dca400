"""K and V in int8 in C: the bytes of the reference, and attention as over what they stand for."""

import pytest
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.int8_kv import SCALE_BYTES, dequantize_rows, quantize_rows
from kernels.native.backend import NativeKernels
from kernels.native.library import Library
from kernels.native.program import Step, ThreadPool

DTYPES = [torch.float32, torch.bfloat16]
PAGE = 16


@pytest.fixture(params=[1, 3])
def kernels(library_of_products: Library, request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(ThreadPool(library_of_products, request.param))


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_int8(num_pages: int, kv_heads: int, page_size: int, head_dim: int) -> list[Tensor]:
    shape = num_pages, kv_heads, page_size, head_dim + SCALE_BYTES
    return [torch.full(shape, 7, dtype=torch.int8) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 12), (2, 80), (4, 2), (1, 15)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rows_are_kept_as_the_reference_has_them(
    kernels: NativeKernels, kv_heads: int, head_dim: int, dtype: torch.dtype, *, has_norm: bool
) -> None:
    batch = AttentionBatch.build([0, 11, 12], [13, 20], [[2, 0], [3, 5, 4]], PAGE)
    heads = 2 * kv_heads
    qkv = randn(12, heads + 2 * kv_heads, head_dim, seed=1)
    qkv[4, heads:] = 0.0
    qkv[5, heads, 0], qkv[6, -1, -1] = torch.nan, torch.inf
    angles = randn(64, head_dim // 2, seed=2) * 3
    cos, sin = (x.to(dtype).float() for x in (angles.cos(), angles.sin()))
    norms = [randn(head_dim, seed=seed) if has_norm else None for seed in (3, 4)]
    kept = in_int8(6, kv_heads, PAGE, head_dim)
    q = kernels.rope_and_write(
        qkv, heads, angles.cos(), angles.sin(), Step(12, batch), *kept, *norms, 1e-6, dtype
    )
    assert q.dtype == dtype
    wide = [torch.full((6, kv_heads, PAGE, head_dim), -1.0) for _ in range(2)]
    step = Step(12, batch)
    kernels.rope_and_write(qkv, heads, cos, sin, step, *wide, *norms, 1e-6, torch.float32)
    pages, offsets = batch.kv_loc // PAGE, batch.kv_loc % PAGE
    for found, floats in zip(kept, wide, strict=True):
        assert torch.equal(found[pages, :, offsets], quantize_rows(floats[pages, :, offsets]))
        others = torch.ones(6, PAGE, dtype=torch.bool)
        others[pages, offsets] = False
        assert bool((found.transpose(1, 2)[others] == 7).all())  # nothing else is written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"),
    [((9, 3), 64, 64), ((2, 2), 80, 16), ((8, 1), 30, 24), ((5, 1), 72, 7), ((4, 2), 2, 1)],
)
def test_attention_has_the_bits_of_attention_over_what_rows_stand_for(
    kernels: NativeKernels,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    lengths, counts = [1, 64, 130, 300], []
    tables, free = [], torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    for length in lengths:
        counts.append(-(-length // page_size))
        tables.append([free.pop() for _ in range(counts[-1])])
    kept = in_int8(500, heads[1], page_size, head_dim)
    for seed, pages in enumerate(kept):
        pages.copy_(quantize_rows(randn(500, heads[1], page_size, head_dim, seed=seed)))
        for table, length in zip(tables, lengths, strict=True):
            pages[table[-1], :, (length - 1) % page_size + 1 :] = -1  # a NaN in bfloat16
    widened = [dequantize_rows(pages, dtype) for pages in kept]
    # Decodes, a chunk in the middle and a whole prompt.
    starts, news = [0, 1, 2, 42, 342], [1, 1, 40, 300]
    batch = AttentionBatch.build(starts, lengths, tables, page_size)
    q = randn(sum(news), heads[0], head_dim, seed=5).to(dtype)
    step = Step(len(q), batch)
    found = kernels.paged_attention(q, kept[0], kept[1], step, 0.2, window).clone()
    expected = kernels.paged_attention(q, widened[0], widened[1], step, 0.2, window)
    assert torch.equal(found, expected)
    assert not found.isnan().any()
