"""Free pages."""

import pytest

from cluster.scheduler.kv_cache.page_pool import PagePool


def test_the_smallest_free_pages_come_first_whatever_the_order_of_freeing() -> None:
    pool = PagePool(6)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]
    pool.free([4, 1, 5, 2])
    assert pool.allocate(3) == [1, 2, 4]
    pool.check([0, 3, 1, 2, 4])


def test_returned_pages_come_before_those_that_were_never_used() -> None:
    pool = PagePool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([2, 0])
    assert pool.num_free == 4
    assert pool.allocate(3) == [0, 2, 4]
    pool.check([0, 1, 2, 3, 4])
    assert pool.num_free == 1


def test_a_page_that_was_never_used_cannot_be_freed() -> None:
    with pytest.raises(AssertionError, match="free already"):
        PagePool(2).free([1])


def test_a_page_cannot_be_freed_twice() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(pages)


def test_more_than_all_free_pages_cannot_be_had() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="free ones"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_lost_page_is_noticed() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="exactly once"):
        pool.check([0])
