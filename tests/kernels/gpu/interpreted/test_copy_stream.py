"""Pages cross the bus on a stream of their own: in order, and each fault in the order is seen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.gpu.backend import GpuKernels
from tests.kernels.gpu.stream_checker import CheckedStream, StreamChecker, Unordered

NUM_PAGES, NUM_HOST_PAGES = 24, 20
SHAPE = (2, 2, 4, 16)  # layers, KV heads, positions, head_dim


def new_pool() -> Tensor:
    num_layers, *page = SHAPE
    return torch.randn(num_layers, 2, NUM_PAGES, *page)


def new_host() -> Tensor:
    num_layers, *page = SHAPE
    return torch.zeros(NUM_HOST_PAGES, num_layers, 2, *page)


def checked(
    monkeypatch: pytest.MonkeyPatch, leaves_out: str = ""
) -> tuple[GpuKernels, StreamChecker]:
    kernels, checker = GpuKernels(deterministic=False), StreamChecker(monkeypatch)
    kernels._page_copies = CheckedStream(checker, leaves_out)
    return kernels, checker


def swap_pages(kernels: GpuKernels) -> None:
    """Save more pages than are staged at once, write to them, and take them back, twice."""
    pool, host = new_pool(), new_host()
    before = pool.clone()
    saved, back = list(range(10)), list(range(10, 20))
    for _ in range(2):
        kernels.save_pages(pool, saved, host, saved)
        kernels.clear_pages(pool, saved)
        kernels.restore_pages(host, saved, pool, back)
        assert torch.equal(pool[:, :, 10:20], before[:, :, :10])
        kernels.restore_pages(host, saved, pool, saved)
    assert torch.equal(pool[:, :, :10], before[:, :, :10])


def swap_states(kernels: GpuKernels) -> None:
    """Save a state, go on from it, and take it back, twice."""
    pages, host = torch.randn(2, 64), torch.zeros(2, 64)
    before = pages.clone()
    for _ in range(2):
        kernels.save_states(pages[0], host[1])
        pages[0] = pages[0] * 2.0
        kernels.restore_states(host[1], pages[1])
        assert torch.equal(pages[1], before[0])
        kernels.restore_states(host[1], pages[0])
    assert torch.equal(pages[0], before[0])


@pytest.mark.parametrize("work", [swap_pages, swap_states])
def test_copies_and_steps_wait_for_each_other_where_they_must(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[GpuKernels], None]
) -> None:
    kernels, checker = checked(monkeypatch)
    with checker:
        work(kernels)
    assert min(checker.num_checked.values()) > 2


@pytest.mark.parametrize("work", [swap_pages, swap_states])
@pytest.mark.parametrize("fault", ["follow_steps", "lead_steps", "keep", "lend"])
def test_each_fault_in_their_order_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[GpuKernels], None], fault: str
) -> None:
    kernels, checker = checked(monkeypatch, fault)
    with checker, pytest.raises(Unordered):
        work(kernels)
