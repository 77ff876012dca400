"""kernels.page_copy: clearing; copies are tested with the cache that asks for them."""

import torch

from kernels.page_copy import clear_pages


def test_only_the_named_pages_are_cleared_in_all_layers() -> None:
    pool = torch.full((3, 2, 5, 2, 4, 8), torch.nan)
    clear_pages(pool, [3, 1])
    assert not pool[:, :, [3, 1]].any()
    assert pool[:, :, [0, 2, 4]].isnan().all()
    clear_pages(pool, [])
    assert pool[:, :, [0, 2, 4]].isnan().all()
