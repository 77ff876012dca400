"""kernels.native.huge_pages: memory for what every step reads from end to end."""

import gc
import platform
from pathlib import Path

import pytest
import torch

from kernels.native.huge_pages import PAGE, HugePages, huge_empty, populate


def mapped_bytes() -> int:
    """Return the size of this process's address space."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[0])


def resident_bytes() -> int:
    """Return how much memory this process has taken."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("is_exact", [False, True])
def test_memory_begins_with_a_huge_page_and_can_be_written_to_its_end(
    num_bytes: int, *, is_exact: bool
) -> None:
    memory = huge_empty(num_bytes, is_exact=is_exact)
    assert memory.data_ptr() % PAGE == 0
    assert len(memory) == num_bytes == memory.untyped_storage().nbytes()
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * num_bytes


def test_exact_memory_takes_no_huge_page_for_what_does_not_fill_one() -> None:
    before = resident_bytes()
    made = [huge_empty(PAGE // 8, is_exact=True).fill_(1) for _ in range(80)]
    assert resident_bytes() < before + 20 * PAGE
    assert all(bool((one == 1).all()) for one in made)


def test_tensors_lie_side_by_side_and_never_in_each_other() -> None:
    pages = HugePages()
    shapes = [(3, 5), (1,), (1024, 1024), (0, 4), (7, 700_000), (2, 2), (20_000_000,), (9,)]
    made = [
        pages.empty(shape, dtype)
        for shape in shapes
        for dtype in (torch.bfloat16, torch.float32, torch.int32)
    ]
    for number, tensor in enumerate(made):
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
        tensor.fill_(number)
    for number, tensor in enumerate(made):
        assert bool((tensor == number).all())


def test_what_is_large_goes_with_its_tensor() -> None:
    pages = HugePages()
    pages.empty((5,), torch.float32)
    before = mapped_bytes()
    large = pages.empty((64 * PAGE,), torch.uint8)
    assert mapped_bytes() >= before + 64 * PAGE
    del large
    gc.collect()
    assert mapped_bytes() < before + 32 * PAGE


def test_memory_can_be_taken_before_its_use_and_keeps_what_is_there() -> None:
    if tuple(map(int, platform.release().split(".")[:2])) < (5, 14):
        pytest.skip("this kernel takes memory at its first use alone")
    memory = huge_empty(40 * PAGE + 5)
    memory[:9], memory[-9:] = 7, 8
    before = resident_bytes()
    populate(memory).join()
    assert resident_bytes() > before + 30 * PAGE
    assert memory[:9].tolist() == [7] * 9 and memory[-9:].tolist() == [8] * 9
    assert int(memory.sum(dtype=torch.int64)) == 9 * 15
