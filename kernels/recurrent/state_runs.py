"""Which rows of a step are one sequence's, and in which state page its past lies.

A state pool is a tensor whose first axis counts state pages; a layer has one pool for each kind of
state that it keeps, and a sequence has the same page in all of them. An op reads a sequence's page
at the first of its rows and leaves there, in place, the state behind the last.

Pools are float32, those of convolutions too: a product's outputs, which a convolution remembers,
are float32 on a CPU, and what is rounded only where a prompt is cut into chunks would make the
tokens depend on the cut. A convolution's state is a few percent of a recurrence's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRun:
    """Rows [start, stop) of a step, which are consecutive tokens of one sequence."""

    start: int
    stop: int
    page: int
    is_new: bool  # they are its first: its state is zero, and what the page holds is not read


def state_runs(
    query_starts: Sequence[int], context_lens: Sequence[int], pages: Sequence[int]
) -> tuple[StateRun, ...]:
    """Return the runs of a step of S sequences.

    Args:
        query_starts: S + 1 row offsets, strictly increasing.
        context_lens: S counts of positions, the new rows included.
        pages: S state pages, all different.
    """
    assert len(set(pages)) == len(pages), "a state page is one sequence's"
    starts = zip(query_starts, query_starts[1:], strict=False)
    runs = []
    for (start, stop), length, page in zip(starts, context_lens, pages, strict=True):
        assert 0 < stop - start <= length, f"{stop - start} rows in a context of {length}"
        runs.append(StateRun(start, stop, page, is_new=stop - start == length))
    return tuple(runs)


def state_at(states: Tensor, run: StateRun) -> Tensor:
    """Return a copy of the state that a run begins with."""
    return torch.zeros_like(states[run.page]) if run.is_new else states[run.page].clone()


def check_states(states: Tensor) -> None:
    """Assert that a tensor is a state pool: pages may lie apart, each in one piece."""
    assert states.dtype == torch.float32, f"states are float32, not {states.dtype}"
    inner = states[:1]
    assert inner.shape[0] == 0 or inner[0].is_contiguous(), "a state is in one piece"
