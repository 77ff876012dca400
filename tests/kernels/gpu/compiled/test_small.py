"""The small kernels as compiled: nothing spilled, wide loads, blocks on an SM as planned."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.gpu.activation import (
    gate_heads,
    gelu_tanh_and_mul,
    silu_and_mul,
    swigluoai_and_mul,
)
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.page_copy import clear_pages, fork_pages, gather_pages, scatter_pages
from kernels.gpu.rope import rope_and_write
from kernels.gpu.sampling.allowed import keep_allowed
from kernels.gpu.sampling.sampler import argmax, sample
from kernels.gpu.wide_norm import square_sums, wide_norm
from tests.kernels.gpu.compiler import SHARED_LIMIT, Compiled, compiling

MODELS = {  # hidden, intermediate, HQ, HK, head_dim, vocabulary
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 49152),
    "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128256),
}
WARPS_OF_AN_SM = 64


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return MODELS[request.param]


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def check(kernels: list[Compiled], num_blocks: int | None = None) -> None:
    """See that nothing spills and `num_blocks`, or all warps, fit on an SM."""
    for kernel in kernels:
        planned = num_blocks or WARPS_OF_AN_SM // kernel.num_warps
        assert kernel.stack_bytes == 0, kernel.name
        assert kernel.shared_bytes <= SHARED_LIMIT[kernel.architecture]
        assert kernel.blocks_per_sm >= planned, (kernel.name, kernel.registers)


def test_norms_fill_an_sm_and_load_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...]
) -> None:
    hidden = model[0]
    weight = bf16(hidden)
    with compiling(architecture) as found:
        add_rms_norm(bf16(2, hidden), torch.empty(2, hidden), weight, 1e-5)
        add_rms_norm(torch.empty(2, hidden), torch.empty(2, hidden), weight, 1e-5)
        add_rms_norm(bf16(2, hidden), None, weight, 1e-5)
        rms_norm(bf16(2, hidden), weight, 1e-5)
    check(found)
    assert [set(kernel.load_bytes) for kernel in found] == [{16}] * 4


def test_the_activation_fills_an_sm_and_loads_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...]
) -> None:
    with compiling(architecture) as found:
        silu_and_mul(bf16(2, 2 * model[1]))
        gelu_tanh_and_mul(bf16(2, 2 * model[1]))
        swigluoai_and_mul(bf16(2, 2 * model[1]), 1.702, 7.0)
    check(found)
    assert [kernel.load_bytes for kernel in found] == [{16: 2}] * 3


def test_the_gate_behind_attention_fills_an_sm_and_loads_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...]
) -> None:
    _, _, num_heads, _, head_dim, _ = model
    with compiling(architecture) as found:
        gate_heads(bf16(2, num_heads, head_dim), bf16(2, num_heads * head_dim))
    check(found)
    assert [kernel.load_bytes for kernel in found] == [{16: 2}]


def test_wide_norms_fill_an_sm_and_load_q_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...]
) -> None:
    """There are as many threads as Q takes; K, which is smaller, is dealt out to all of them."""
    _, _, num_heads, num_kv_heads, head_dim, _ = model
    qkv = bf16(2, num_heads + 2 * num_kv_heads, head_dim)
    widths = num_heads * head_dim, num_kv_heads * head_dim
    with compiling(architecture) as found:
        sums = square_sums(qkv, num_heads, num_kv_heads, counts_kv=True)
        wide_norm(qkv, sums, bf16(widths[0]), bf16(widths[1]), widths, 1e-5)
    check(found)
    assert [kernel.load_bytes.get(16) for kernel in found] == [1, 2]  # Q; Q and its weight


@pytest.mark.parametrize("norms", [False, True])
def test_rope_has_32_blocks_on_an_sm_and_loads_heads_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...], norms: bool
) -> None:
    _, _, num_heads, num_kv_heads, head_dim, _ = model
    table, places = torch.empty(100, head_dim // 2), torch.zeros(2, dtype=torch.int64)
    pages = bf16(4, num_kv_heads, 64, head_dim)
    weight = bf16(head_dim) if norms else None
    qkv = bf16(2, num_heads + 2 * num_kv_heads, head_dim)
    with compiling(architecture) as found:
        rope_and_write(
            qkv, num_heads, table, table, places, places, pages, pages, weight, weight, 1e-5
        )
    check(found, num_blocks=32)  # of one warp; more an SM cannot hold
    assert found[0].load_bytes[16] >= 6  # two halves of q, of k and of v


def test_page_copies_fill_an_sm_and_load_16_bytes_at_a_time(
    architecture: int, model: tuple[int, ...]
) -> None:
    page = (model[3], 64, model[4])
    pool, staged = bf16(2, 2, 4, *page), bf16(2, 2, 2, *page)
    pages = torch.zeros(2, dtype=torch.int32)
    with compiling(architecture) as found:
        gather_pages(pool, pages, staged)
        scatter_pages(staged, pool, pages)
        fork_pages(pool, pages, pages, pages)
        clear_pages(pool, pages)
    check(found)
    for kernel in found[:3]:
        assert kernel.load_bytes[16] == 4  # beside ids and counts
        assert set(kernel.load_bytes) == {4, 16}


@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_sampling_reads_logits_16_bytes_at_a_time_and_does_not_spill(
    architecture: int, vocab: int
) -> None:
    logits, ones, counts = torch.empty(2, vocab), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    with compiling(architecture) as found:
        argmax(logits)
        sample(logits, ones, counts.int(), ones, ones, counts, counts)
        keep_allowed(logits, [1], [np.zeros(vocab // 8, np.uint8)])
    check([found.pop()])
    surveys, (draw, finish) = [found[0], found[2]], found[3:]
    check(surveys, num_blocks=8)
    check([draw], num_blocks=2)  # of 8 warps
    check([finish], num_blocks=1 if vocab > 131072 else 2)  # one for each row: no more is asked
    assert all(kernel.load_bytes == {16: 8} for kernel in surveys)
    assert draw.load_bytes[16] == 4  # the rest are the row's own numbers
    assert finish.load_bytes[16] >= 2
