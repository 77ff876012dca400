"""paged_decode and paged_prefill, compiled: nothing spills, and SMs are well filled."""

from typing import Any

import pytest
import torch

from kernels.gpu.attention import paged_decode, paged_prefill
from tests.kernels.gpu.compiler import SHARED_LIMIT, Compiled, compiling

KERNELS: tuple[Any, ...] = (
    paged_decode._attend_split,
    paged_decode._merge_splits,
    paged_prefill._attend_block,
)
SMOL, LLAMA = (9, 3, 64), (32, 8, 128)  # query heads, KV heads, head_dim
MODELS = pytest.mark.parametrize("model", [SMOL, LLAMA], ids=["smollm2", "llama"])


def tensors(
    model: tuple[int, int, int], page_size: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """Return q, K, V, out and a page table of some step."""
    num_heads, num_kv_heads, head_dim = model
    qkv = torch.empty(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    k_pages = torch.empty(2, num_kv_heads, page_size, head_dim, dtype=dtype)
    out = torch.empty(5, num_heads, head_dim, dtype=dtype)
    table = torch.zeros(3, 7, dtype=torch.int32)
    return qkv[:, :num_heads], k_pages, torch.empty_like(k_pages), out, table


def compile_decode(
    architecture: int, model: tuple[int, int, int], page_size: int, max_splits: int = 3
) -> list[Compiled]:
    q, k_pages, v_pages, out, table = tensors(model, page_size)
    three = torch.zeros(3, dtype=torch.int32)
    with compiling(architecture) as found:
        paged_decode.paged_decode(q, k_pages, v_pages, three, table, three, 0.1, out, max_splits)
    return found


def compile_prefill(
    architecture: int, model: tuple[int, int, int], page_size: int
) -> list[Compiled]:
    q, k_pages, v_pages, out, table = tensors(model, page_size)
    blocks = torch.zeros(2, 4, dtype=torch.int32)
    with compiling(architecture) as found:
        paged_prefill.paged_prefill(q, k_pages, v_pages, blocks, table, 0.1, out)
    return found


def check(kernel: Compiled, blocks_per_sm: int, most_stack: int = 0) -> None:
    assert kernel.stack_bytes <= most_stack
    assert kernel.shared_bytes <= SHARED_LIMIT[kernel.architecture]
    assert kernel.blocks_per_sm >= blocks_per_sm


def check_operands(kernel: Compiled, num_scalars: int) -> None:
    """Matrices go to tensor cores; all but lengths, rows and page ids is read 16 bytes wide."""
    assert kernel.num_matrix_instructions > 0
    assert set(kernel.load_bytes) == {4, 16}
    assert kernel.load_bytes[4] <= num_scalars and kernel.load_bytes[16] >= 5


@MODELS
@pytest.mark.parametrize("page_size", [64, 128])
def test_decode(architecture: int, model: tuple[int, int, int], page_size: int) -> None:
    """K and V of two turns lie in shared memory; with 16 KB tiles it is what fills an SM."""
    split, merge = compile_decode(architecture, model, page_size)
    is_small = page_size * model[2] <= 64 * 64
    planned = {80: 4 if is_small else 3, 90: 7 if is_small else 5, 100: 7 if is_small else 5}
    check(split, planned[architecture])
    check_operands(split, num_scalars=6)
    check(merge, 12)
    assert merge.load_bytes[16] > 0


@MODELS
@pytest.mark.parametrize("page_size", [16])
def test_decode_with_small_pages(
    architecture: int, model: tuple[int, int, int], page_size: int
) -> None:
    split, _ = compile_decode(architecture, model, page_size)
    check(split, 4)
    check_operands(split, num_scalars=6)


@MODELS
def test_prefill(architecture: int, model: tuple[int, int, int]) -> None:
    """Eight warps: one block with head_dim 128; two with 64, where Ampere holds only one."""
    (block,) = compile_prefill(architecture, model, 64)
    is_small = model[2] == 64
    # For Blackwell ptxas lays the addresses of the stores aside while the loops run, to fit two.
    most_stack = 16 if is_small and architecture == 100 else 0
    check(block, 2 if is_small and architecture > 80 else 1, most_stack)
    check_operands(block, num_scalars=15)
    if architecture == 90:
        assert "HGMMA" in block.sass, "warp groups multiply"


@MODELS
@pytest.mark.parametrize("page_size", [128])
def test_prefill_with_other_pages(
    architecture: int, model: tuple[int, int, int], page_size: int
) -> None:
    (block,) = compile_prefill(architecture, model, page_size)
    check(block, 1)
    check_operands(block, num_scalars=15)


@pytest.mark.parametrize("model", [(32, 32, 96), (4, 1, 256)], ids=["phi-3", "gemma-3"])
def test_other_head_sizes(architecture: int, model: tuple[int, int, int]) -> None:
    """Of 96 dimensions a quarter of each tile is padding; 256 leave half of the rows."""
    split, merge = compile_decode(architecture, model, 64)
    (block,) = compile_prefill(architecture, model, 64)
    for kernel in (split, merge, block):
        check(kernel, 1)
    check_operands(split, num_scalars=6)
    check_operands(block, num_scalars=15)


@pytest.mark.parametrize("window", [0, 128])
def test_sinks_cost_no_stack_and_no_block_of_an_sm(architecture: int, window: int) -> None:
    """Of gpt-oss: 8 query heads share a KV head."""
    q, k_pages, v_pages, out, table = tensors((64, 8, 64), 64)
    three, blocks = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    kernels: list[list[Compiled]] = []
    for sinks in (None, torch.zeros(64)):
        with compiling(architecture) as found:
            paged_decode.paged_decode(
                q, k_pages, v_pages, three, table, three, 0.1, out, 3, window, sinks
            )
            paged_prefill.paged_prefill(q, k_pages, v_pages, blocks, table, 0.1, out, window, sinks)
        kernels.append(found)
    for plain, sunk in zip(*kernels, strict=True):
        check(sunk, plain.blocks_per_sm, plain.stack_bytes)


def test_one_kernel_decodes_however_many_splits_there_is_room_for(architecture: int) -> None:
    """The same machine code, so the same bits."""
    (alone,) = compile_decode(architecture, LLAMA, 64, max_splits=1)
    split, _ = compile_decode(architecture, LLAMA, 64, max_splits=64)
    assert alone.cubin == split.cubin


def test_no_batch_waits_for_a_kernel_of_its_own() -> None:
    """Lengths of tables and places of index tensors, which differ by batch, are not compiled in."""
    q, k_pages, v_pages, out, _ = tensors(SMOL, 64)
    with compiling(90):
        for width in (1, 7, 16):
            for offset in (0, 1):
                table = torch.zeros(offset + 3 * width, dtype=torch.int32)[offset:].view(3, width)
                index = torch.zeros(offset + 3, dtype=torch.int32)[offset:]
                paged_decode.paged_decode(
                    q, k_pages, v_pages, index, table, index, 0.1, out, 2 + width
                )
                blocks = torch.zeros(offset + 12, dtype=torch.int32)[offset:].view(3, 4)
                paged_prefill.paged_prefill(q, k_pages, v_pages, blocks, table, 0.1, out)
    for kernel in KERNELS:
        assert len(kernel.device_caches[0][0]) == 1
