"""The functions that move, fork and clear pages of K, V and states on a GPU, and its host tier.

Copies to the host and back are made on a stream of their own, beside the steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.gpu.async_copy import send_numbers
from kernels.gpu.copy_stream import CopyStream
from kernels.gpu.page_copy import clear_pages, fork_pages, gather_pages, scatter_pages

_STAGED_PAGES = 8  # on their way between the tiers at once: tens of megabytes


class GpuPages:
    """See `kernels.interface.Kernels`."""

    def __init__(self) -> None:
        self._page_copies = CopyStream()

    def save_pages(
        self, pool: Tensor, sources: Sequence[int], host: Tensor, targets: Sequence[int]
    ) -> None:
        for start in range(0, len(sources), _STAGED_PAGES):
            pages = _index(sources[start : start + _STAGED_PAGES], pool.device)
            staged = torch.empty(
                (len(pages), *host.shape[1:]), dtype=pool.dtype, device=pool.device
            )
            gather_pages(pool, pages, staged)
            self._save(staged, [host[target] for target in targets[start : start + len(pages)]])

    def restore_pages(
        self, host: Tensor, sources: Sequence[int], pool: Tensor, targets: Sequence[int]
    ) -> None:
        for start in range(0, len(targets), _STAGED_PAGES):
            pages = _index(targets[start : start + _STAGED_PAGES], pool.device)
            wanted = [host[source] for source in sources[start : start + len(pages)]]
            with self._restored(wanted, pool.device) as staged:
                scatter_pages(staged, pool, pages)

    def save_states(self, page: Tensor, host: Tensor) -> None:
        self._save(page.clone().unsqueeze(0), [host])

    def restore_states(self, host: Tensor, page: Tensor) -> None:
        with self._restored([host], page.device) as staged:
            page.copy_(staged[0])

    def _save(self, staged: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy what steps have queued to be made to the host, beside the steps that come."""
        self._page_copies.follow_steps(staged.device)
        with self._page_copies.beside(staged.device):
            for page, target in zip(staged, targets, strict=True):
                target.copy_(page, non_blocking=True)
        self._page_copies.keep(staged)

    @contextmanager
    def _restored(self, sources: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
        """Give copies of host pages, one behind the other, to what steps queue inside.

        They are copied beside the steps before: only what is queued from here on waits for them.
        """
        with self._page_copies.beside(device):
            shape = len(sources), *sources[0].shape
            staged = torch.empty(shape, dtype=sources[0].dtype, device=device)
            for page, source in zip(staged, sources, strict=True):
                page.copy_(source, non_blocking=True)
        self._page_copies.lead_steps(device)
        yield staged
        self._page_copies.lend(staged)

    def fork_pages(
        self,
        pool: Tensor,
        sources: Sequence[int],
        targets: Sequence[int],
        num_positions: Sequence[int],
    ) -> None:
        numbers = (_index(column, pool.device) for column in (sources, targets, num_positions))
        fork_pages(pool, *numbers)

    def clear_pages(self, pool: Tensor, pages: Sequence[int] | Tensor) -> None:
        clear_pages(pool, pages if isinstance(pages, Tensor) else _index(pages, pool.device))


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    return send_numbers(numbers, torch.int32, device)
