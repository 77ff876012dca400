"""Copies of pages of states between and within the tiers of one rank."""

import torch
from torch import Tensor

from kernels.torch_backend import CpuKernels
from worker.cache.state_pool import StatePool
from worker.protocol import PageCopy

SHAPES = ((3, 7), (2, 5, 4))


def pool_of() -> StatePool:
    pool = StatePool(3, SHAPES, 4, 2, torch.device("cpu"), CpuKernels())
    for number, state in enumerate(state for layer in pool.layers for state in layer):
        for page in range(4):
            state[page] = 10 * number + page
    return pool


def content(pool: StatePool, page: int) -> list[Tensor]:
    return [state[page].clone() for layer in pool.layers for state in layer]


def test_each_layer_has_all_of_its_states_in_one_piece() -> None:
    pool = pool_of()
    assert [[state.shape[1:] for state in layer] for layer in pool.layers] == [[*SHAPES]] * 3
    for number, state in enumerate(content(pool, 2)):
        assert state.is_contiguous() and (state == 10 * number + 2).all()


def test_a_page_is_copied_whole_and_comes_back_from_the_host_as_it_went() -> None:
    pool = pool_of()
    pool.copy([PageCopy("save", 1, 0, 16, "state"), PageCopy("fork", 2, 1, 16, "state")])
    pool.copy([PageCopy("restore", 0, 3, 16, "state")])
    for number, of_pages in enumerate(
        zip(*(content(pool, page) for page in range(4)), strict=True)
    ):
        found = [set(state.flatten().tolist()) for state in of_pages]
        assert found == [{10.0 * number + page} for page in (0, 2, 2, 1)]


def test_a_copy_sees_what_those_before_it_have_written() -> None:
    pool = pool_of()
    pool.copy([PageCopy("fork", 0, 1, 16, "state"), PageCopy("fork", 1, 2, 16, "state")])
    assert all((state == 10 * number).all() for number, state in enumerate(content(pool, 2)))
