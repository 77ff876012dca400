"""Copies of pages between and within the tiers of one rank."""

import pytest
import torch

from kernels.torch_backend import CpuKernels
from worker.cache.kv_cache import KVCache
from worker.pools import PageCounts
from worker.protocol import PageCopy

PAGE = 4
POISON = torch.nan


def save(source, target):
    return PageCopy("save", source, target, PAGE)


def restore(source, target):
    return PageCopy("restore", source, target, PAGE)


def fork(source, target, num_positions):
    return PageCopy("fork", source, target, num_positions)


@pytest.fixture
def cache():
    """Return a cache of poisoned pages."""
    cache = KVCache(
        num_layers=3,
        pages=PageCounts(6),
        host_pages=PageCounts(4),
        num_kv_heads=2,
        page_size=PAGE,
        head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=CpuKernels(),
    )
    cache._pools["full"].pages.fill_(POISON)
    cache._pools["full"].host_pages.fill_(POISON)
    return cache


def fill(cache, page, seed):
    """Write random K and V over a page of all layers."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(3):
        for pages in cache.layer(index):
            pages[page] = torch.randn(2, PAGE, 8, generator=generator)


def content(cache, page):
    """Return a page of all layers, [L, 2, HK, page, D]."""
    layers = [torch.stack([pages[page] for pages in cache.layer(index)]) for index in range(3)]
    return torch.stack(layers)


def test_a_page_comes_back_from_the_host_as_it_went(cache):
    fill(cache, 2, seed=1)
    before = content(cache, 2)
    cache.copy([save(2, 3)])
    cache.clear([2])
    cache.copy([restore(3, 5)])
    assert torch.equal(content(cache, 5), before)
    assert torch.equal(content(cache, 2), torch.zeros_like(before))


def test_a_copy_touches_no_other_page(cache):
    for page in range(6):
        fill(cache, page, seed=page)
    before = [content(cache, page) for page in range(6)]
    cache.copy([save(2, 3), restore(3, 5), fork(1, 4, 3)])
    for page in (0, 1, 2, 3):
        assert torch.equal(content(cache, page), before[page])
    assert cache._pools["full"].host_pages[:3].isnan().all()


@pytest.mark.parametrize("num_positions", [1, 3, PAGE])
def test_a_fork_has_the_first_positions_and_zeros_behind_them(cache, num_positions):
    fill(cache, 0, seed=1)
    source = content(cache, 0)
    for pages in (cache.layer(index) for index in range(3)):
        for one in pages:
            one[0, :, num_positions:] = POISON  # what a decode left behind the shared positions
    cache.copy([fork(0, 1, num_positions)])
    forked = content(cache, 1)  # was poisoned all over
    assert torch.equal(forked[..., :num_positions, :], source[..., :num_positions, :])
    assert (forked[..., num_positions:, :] == 0).all()


def test_a_page_is_saved_before_it_is_restored_to(cache):
    fill(cache, 0, seed=1)
    fill(cache, 1, seed=2)
    first, second = content(cache, 0), content(cache, 1)
    # Two pages change places through the host, and one of them is forked where it then lies.
    cache.copy([save(0, 0), save(1, 1), restore(0, 1), restore(1, 0), fork(1, 2, 2)])
    assert torch.equal(content(cache, 0), second)
    assert torch.equal(content(cache, 1), first)
    assert torch.equal(content(cache, 2)[..., :2, :], first[..., :2, :])


def test_a_host_page_is_used_again_within_one_plan(cache):
    fill(cache, 0, seed=1)
    fill(cache, 1, seed=2)
    first, second = content(cache, 0), content(cache, 1)
    cache.copy([save(0, 2), restore(2, 4), save(1, 2), restore(2, 5)])
    assert torch.equal(content(cache, 4), first)
    assert torch.equal(content(cache, 5), second)


def test_a_poisoned_page_is_carried_bit_for_bit(cache):
    """A copy is not arithmetic: it must not repair or spread what it moves."""
    cache.copy([save(0, 0), restore(0, 1)])
    assert content(cache, 1).isnan().all()


def test_a_cache_without_a_host_tier_takes_no_host_memory():
    cache = KVCache(
        num_layers=1,
        pages=PageCounts(1),
        num_kv_heads=1,
        page_size=PAGE,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=CpuKernels(),
    )
    assert cache._pools["full"].host_pages.numel() == 0


def test_copies_that_hang_together_are_made_one_after_the_other(cache):
    """What is written is read again, a source is overwritten, a target is written twice."""
    for page in range(6):
        fill(cache, page, seed=page)
    before = [content(cache, page) for page in range(6)]
    cache.copy(
        [fork(0, 1, PAGE), fork(1, 2, PAGE)]  # a chain: 2 is what 0 was
        + [fork(3, 4, PAGE), fork(5, 3, PAGE)]  # 3 is read, then written
        + [save(4, 0), save(5, 0)]  # the second stays
        + [restore(0, 5), restore(0, 0)]
    )
    wanted = [5, 0, 0, 5, 3, 5]
    for page, source in enumerate(wanted):
        assert torch.equal(content(cache, page), before[source])


class Noting(CpuKernels):
    """Notes which copies are asked for at once."""

    def __init__(self) -> None:
        self.asked = []

    def save_pages(self, pool, sources, host, targets):
        self.asked.append(("save", list(zip(sources, targets, strict=True))))

    def restore_pages(self, host, sources, pool, targets):
        self.asked.append(("restore", list(zip(sources, targets, strict=True))))

    def fork_pages(self, pool, sources, targets, num_positions):
        self.asked.append(("fork", list(zip(sources, targets, strict=True))))


def test_copies_are_made_at_once_as_far_as_they_do_not_hang_together(cache):
    cache._pools["full"]._kernels = noted = Noting()
    cache.copy(
        [fork(0, 1, 2), fork(0, 2, 3), fork(1, 3, 1), fork(4, 5, 1), fork(0, 4, 1), fork(2, 4, 1)]
        + [save(4, 0), save(4, 1), save(5, 0)]
        + [restore(0, 5), restore(0, 4), restore(1, 5)]
    )
    assert noted.asked == [
        ("fork", [(0, 1), (0, 2)]),
        ("fork", [(1, 3), (4, 5)]),  # reads what was written
        ("fork", [(0, 4)]),  # writes what was read
        ("fork", [(2, 4)]),  # writes it again
        ("save", [(4, 0), (4, 1)]),
        ("save", [(5, 0)]),
        ("restore", [(0, 5), (0, 4)]),
        ("restore", [(1, 5)]),
    ]


@pytest.fixture
def two_kinds():
    """Return a cache whose second layer has pages of its own."""
    cache = KVCache(
        num_layers=3,
        pages=PageCounts(6, window=3),
        host_pages=PageCounts(4, window=2),
        num_kv_heads=2,
        page_size=PAGE,
        head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=CpuKernels(),
        window_layers=(1,),
    )
    for pool in cache._pools.values():
        pool.pages.fill_(1.0)
        pool.host_pages.fill_(2.0)
    return cache


def test_layers_with_a_window_have_as_many_pages_as_they_are_given(two_kinds):
    assert two_kinds.pools == ("full", "window")
    assert [two_kinds.pool_of(layer) for layer in range(3)] == ["full", "window", "full"]
    assert [two_kinds.layer(layer)[0].shape[0] for layer in range(3)] == [6, 3, 6]


def test_a_page_is_cleared_and_copied_in_the_layers_of_its_kind(two_kinds):
    two_kinds.clear([1], [2])
    cleared = [(pages == 0).flatten(1).all(1).nonzero().flatten() for pages in keys(two_kinds)]
    assert [one.tolist() for one in cleared] == [[1], [2], [1]]
    two_kinds.copy([PageCopy("restore", 0, 0, PAGE, "window")])
    assert [(pages == 2).any().item() for pages in keys(two_kinds)] == [False, True, False]
    two_kinds.copy([PageCopy("save", 1, 3, PAGE), PageCopy("restore", 3, 0, PAGE)])
    assert [(pages[0] == 0).all().item() for pages in keys(two_kinds)] == [True, False, True]


def keys(cache):
    return [cache.layer(layer)[0] for layer in range(3)]


def test_where_all_layers_slide_the_other_pages_are_no_memory():
    cache = KVCache(
        num_layers=2,
        pages=PageCounts(1000, window=3),
        num_kv_heads=1,
        page_size=PAGE,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=CpuKernels(),
        window_layers=(0, 1),
    )
    assert cache.pools == ("window",)
    cache.clear([999], [1])
    assert (cache.layer(1)[1][1] == 0).all()
