"""Kernels whose programs start early, compiled: none writes or ends before it has waited."""

import re

import torch
from torch import Tensor

from kernels.gpu.activation import gate_heads, silu_and_mul
from kernels.gpu.attention.paged_decode import paged_decode
from kernels.gpu.lora.apply import NUM_SHARES, lora_apply
from kernels.gpu.norm import add_rms_norm
from kernels.gpu.rope import rope_and_write
from tests.kernels.gpu.compiler import Compiled, compiling

# As Hopper's machine code has griddepcontrol.wait and .launch_dependents, stores, and ends.
_WAIT, _START = r"\bACQBULK\b", r"\bPREEXIT\b"
_STORE_OR_END = r"\b(?:STG|ST|RED|ATOMG|EXIT)\b"


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def compile_lora(architecture: int, *, are_sent: bool) -> list[Compiled]:
    x, y = (zeros(2, width, dtype=torch.bfloat16) for width in (4096, 6144))
    shares = zeros(NUM_SHARES + 1, 4) if are_sent else None
    with compiling(architecture) as found:
        table = zeros(2, 14, dtype=torch.int64)
        lora_apply(y, x, zeros(2, 3), table, (4096, 1024, 1024), x.dtype, 64, shares)
    return found


def rope(rows: int) -> None:
    qkv = zeros(rows, 48, 128, dtype=torch.bfloat16)
    pages = zeros(2, 8, 64, 128, dtype=torch.bfloat16)
    turns = zeros(9, 64, dtype=torch.float32)
    at = zeros(rows, dtype=torch.int64)
    rope_and_write(qkv, 32, turns, turns, at, at, pages, pages, None, None, 1e-5)


def compile_decode_step(architecture: int) -> list[Compiled]:
    """Compile what a decode step launches to start early."""
    rows = zeros(2, 4096, dtype=torch.bfloat16)
    q, out = (zeros(2, 32, 128, dtype=torch.bfloat16) for _ in range(2))
    pages = zeros(2, 8, 64, 128, dtype=torch.bfloat16)
    two = zeros(2)
    with compiling(architecture) as found:
        add_rms_norm(rows, zeros(2, 4096, dtype=torch.float32), rows[0], 1e-5)
        silu_and_mul(rows)
        gate_heads(q, rows)
        rope(rows=2)
        for window in (0, 500):
            paged_decode(q, pages, pages, two, zeros(2, 7), two, 0.1, out, 3, window)
    return found + compile_lora(architecture, are_sent=True)


def first(pattern: str, kernel: Compiled) -> int:
    found = re.search(pattern, kernel.sass)
    assert found is not None, f"{kernel.name} has no {pattern}"
    return found.start()


def test_every_program_waits_before_it_writes_or_ends() -> None:
    kernels = compile_decode_step(90)
    assert len({kernel.name for kernel in kernels}) == 8
    for kernel in kernels:
        assert kernel.is_dependent, kernel.name
        assert first(_START, kernel) < first(_WAIT, kernel) < first(_STORE_OR_END, kernel)


def test_a_gpu_before_hopper_knows_nothing_of_it() -> None:
    for kernel in compile_decode_step(80):
        assert not kernel.is_dependent and not re.search(f"{_WAIT}|{_START}", kernel.sass)


def test_a_prompt_s_rope_does_not_wait_program_by_program() -> None:
    with compiling(90) as found:
        rope(rows=2048)
    assert not found[0].is_dependent and not re.search(f"{_WAIT}|{_START}", found[0].sass)


def test_tiles_that_a_kernel_made_are_not_read_before_it_is_done() -> None:
    assert [kernel.is_dependent for kernel in compile_lora(90, are_sent=False)] == [False, False]
