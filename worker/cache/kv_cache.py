"""The paged KV cache of a rank: K and V of every page, all layers, on device and in host memory.

Owns the memory and its cleanliness: a page is cleared when it is given out, so that nothing left in
it, another tenant's values or a NaN, can reach a result. Layers with mixers have states instead, in
pages of a pool of their own.

Shapes: L layers, P pages, HK KV heads of this rank, D what a row of K or V takes: head_dim, or in
int8 the bytes of its codes and its scale.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.interface import AnyKernels
from worker.cache.page_budget import row_bytes
from worker.cache.state_pool import StatePool
from worker.mixers.config import Shape
from worker.pools import NO_PAGES, KVCacheDtype, PageCounts

if TYPE_CHECKING:
    from worker.pools import PoolName
    from worker.protocol import PageCopy


class KVCache:
    """Pages of one rank: those that attention reads, and the host tier.

    Layers with a sliding window may have pages of their own, and those with mixers do.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        pages: PageCounts,
        host_pages: PageCounts = NO_PAGES,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: AnyKernels,
        window_layers: Sequence[int] = (),
        state_layers: Sequence[int] = (),
        state_shapes: Sequence[Shape] = (),
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """Make the pages; they have rows of `dtype` unless `kv_cache_dtype` says otherwise."""
        self._kernels = kernels
        self.page_size = page_size
        self.num_pages = pages
        others = {*window_layers, *state_layers}
        layers = [layer for layer in range(num_layers) if layer not in others]
        if kv_cache_dtype == "int8":
            dtype, head_dim = torch.int8, row_bytes(head_dim, 1, kv_cache_dtype)
        shape = num_kv_heads, page_size, head_dim
        self._pools: dict[PoolName, _Pool] = {}
        if layers:
            counts = pages.full, host_pages.full
            self._pools["full"] = _Pool(len(layers), *counts, shape, dtype, device, kernels)
        if window_layers:
            counts = pages.window, host_pages.window
            self._pools["window"] = _Pool(
                len(window_layers), *counts, shape, dtype, device, kernels
            )
        self._states: StatePool | None = None
        if state_layers:
            counts = pages.state, host_pages.state
            self._states = StatePool(len(state_layers), state_shapes, *counts, device, kernels)
        states: tuple[PoolName, ...] = ("state",) if state_layers else ()
        self.pools: tuple[PoolName, ...] = (*self._pools, *states)
        places: dict[int, tuple[PoolName, int]] = {}
        places |= {layer: ("full", place) for place, layer in enumerate(layers)}
        places |= {layer: ("window", place) for place, layer in enumerate(window_layers)}
        places |= {layer: ("state", place) for place, layer in enumerate(state_layers)}
        self._places = places

    def pool_of(self, index: int) -> "PoolName":
        """Return whose pages a layer has."""
        return self._places[index][0]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return (K pages, V pages) of a layer, each [P, HK, page, D], or its mixer's states."""
        name, place = self._places[index]
        if self._states is not None and name == "state":
            return self._states.layers[place]
        return self._pools[name].layers[place]

    def warm_up(self) -> None:
        """Make every kind of copy once, of pages that nobody has yet."""
        for pool in self._pools.values():
            pool.warm_up()

    def clear(
        self, pages: Sequence[int] | Tensor, window_pages: Sequence[int] | Tensor = ()
    ) -> None:
        """Fill pages with zeros in all their layers, if need be; see `Kernels.clear_pages`."""
        if not self._kernels.reads_past_contexts:
            return
        given: dict[PoolName, Sequence[int] | Tensor] = {"full": pages, "window": window_pages}
        for name, pool in self._pools.items():
            if len(given[name]):
                self._kernels.clear_pages(pool.pages, given[name])

    def copy(self, copies: Sequence["PageCopy"]) -> None:
        """Make copies one after the other: each sees what those before it have written."""
        for name, pool in self._pools.items():
            for run in _independent([copy for copy in copies if copy.pool == name]):
                pool.copy(run)
        if self._states is not None:
            self._states.copy([copy for copy in copies if copy.pool == "state"])


class _Pool:
    """The pages of the layers of one kind."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_host_pages: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        kernels: AnyKernels,
    ) -> None:
        """Make the pages, each of `shape` [HK, page, D] for each layer, and for K and V."""
        self._kernels = kernels
        # Not filled here: every page is cleared or copied to when given out, or is read no further
        # than it has been written to.
        self.pages = kernels.empty_pool((num_layers, 2, num_pages, *shape), dtype, device)
        self.layers = [(pages[0], pages[1]) for pages in self.pages]
        # A host page is one piece of memory, all layers together, so that it crosses in one go.
        self.host_pages = torch.empty(
            (num_host_pages, num_layers, 2, *shape),
            dtype=dtype,
            device="cpu",
            pin_memory=kernels.pins_memory and num_host_pages > 0,
        )

    def warm_up(self) -> None:
        """See `KVCache.warm_up`."""
        if not self.pages.shape[2]:
            return
        self._kernels.clear_pages(self.pages, [0])
        self._kernels.fork_pages(self.pages, [0], [0], [1])
        if len(self.host_pages):
            self._kernels.save_pages(self.pages, [0], self.host_pages, [0])
            self._kernels.restore_pages(self.host_pages, [0], self.pages, [0])

    def copy(self, run: Sequence["PageCopy"]) -> None:
        """Make copies of one kind that may be made at once.

        On a GPU all of this is queued, in this order, and what crosses the bus beside the steps;
        the CPU never looks at a host page: there is nothing to wait for.
        """
        sources, targets = [one.source for one in run], [one.target for one in run]
        match run[0].kind:
            case "save":
                self._kernels.save_pages(self.pages, sources, self.host_pages, targets)
            case "restore":
                self._kernels.restore_pages(self.host_pages, sources, self.pages, targets)
            case "fork":
                shared = [one.num_positions for one in run]
                self._kernels.fork_pages(self.pages, sources, targets, shared)


def _independent(copies: Sequence["PageCopy"]) -> Iterator[list["PageCopy"]]:
    """Cut copies into runs of one kind in which none reads or writes what another has written."""
    run: list[PageCopy] = []
    for copy in copies:
        written = {one.target for one in run}
        touched = {copy.source, copy.target} if copy.kind == "fork" else {copy.target}
        if run and (run[0].kind != copy.kind or written & touched or _reads(run, copy)):
            yield run
            run = []
        run.append(copy)
    if run:
        yield run


def _reads(run: Sequence["PageCopy"], copy: "PageCopy") -> bool:
    """Whether one of a run of forks reads the page that a fork writes."""
    return copy.kind == "fork" and any(one.source == copy.target for one in run)
