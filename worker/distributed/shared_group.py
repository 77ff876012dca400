"""All-reduce over shared memory: a group whose ranks are processes on the CPUs of one host.

Owns how the ranks agree to use it, all of them or none, and how long one waits for another. Sums
and gathers are done in C (kernels/native/exchange.c). The connections of a `SocketGroup` stay: they
are how the ranks agree, and their ends are how a death is noticed at once.
"""

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kernels.native.library import ExchangeState, Library, native_library
from kernels.native.ops import number_of
from worker.distributed.communicator import Communicator, summed_as
from worker.distributed.shared_memory import SharedMemory, host_identity
from worker.distributed.socket_group import SocketGroup
from worker.errors import GroupBroken

_MAX_RANKS = 64
_HEADER_BYTES = 128  # of each rank; as exchange.c has them
_SEGMENT_BYTES = 256 * 1024  # so that what is written and what is read stays in a core's cache
_NUM_SPINS = 1000  # about 40 us, if each rank can have a core

_DONE, _NOT_YET = 0, 1  # as exchange.h has them
_NUM_LOOKS = 20  # of a millisecond each, after which a rank that waits sleeps between two
_SLEEP = 0.001

_logger = logging.getLogger(__name__)


def share_memory(sockets: SocketGroup) -> Communicator:
    """Return the same group with memory that all ranks share; `sockets` if one cannot.

    Raises:
        GroupBroken: if a rank does not take part.
    """
    library = native_library() if sockets.size <= _MAX_RANKS else None
    hosts = sockets.all_gather_text("" if library is None else host_identity())
    # All ranks have gathered the same texts, so all decide the same here and below.
    if library is None or not hosts[0] or len(set(hosts)) > 1:
        _logger.info("ranks sum over TCP: not all on one host, or not all with native functions")
        return sockets
    memory = _common_memory(sockets)
    return sockets if memory is None else SharedGroup(sockets, memory, library)


def region_bytes(size: int) -> int:
    """Return the bytes that `size` ranks need: a header and two buffers each."""
    return size * (_HEADER_BYTES + 2 * _SEGMENT_BYTES)


def _common_memory(sockets: SocketGroup) -> SharedMemory | None:
    """Return memory that rank 0 has made and all have found; None if one could not."""
    memory: SharedMemory | None = None
    try:
        failure = ""
        try:
            if sockets.rank == 0:
                memory = SharedMemory.create(region_bytes(sockets.size))
        except OSError as error:
            failure = f"rank 0 got none: {error}"
        ticket = sockets.all_gather_text("" if memory is None else memory.ticket)[0]
        try:
            if sockets.rank > 0 and ticket:
                memory = SharedMemory.find(ticket, region_bytes(sockets.size))
        except (OSError, ValueError) as error:
            failure = f"rank {sockets.rank} could not map it: {error}"
        failures = [text for text in sockets.all_gather_text(failure) if text]
    finally:
        if memory is not None:
            memory.hide()
    if failures:
        _logger.warning("ranks sum over TCP, as they cannot share memory: %s", "; ".join(failures))
        return None
    return memory


class SharedGroup:
    """One rank of such a group; made by `share_memory`."""

    def __init__(self, sockets: SocketGroup, memory: SharedMemory, library: Library) -> None:
        self.rank = sockets.rank
        self.size = sockets.size
        self._sockets = sockets
        self._memory = memory  # mapped as long as this lives
        self._library = library
        # With too few cores, what a rank waits for may need its own.
        num_spins = _NUM_SPINS if (os.cpu_count() or 1) >= self.size else 0
        self._state = ExchangeState(memory.address, self.rank, self.size, _SEGMENT_BYTES, num_spins)
        self._state_address = ctypes.addressof(self._state)
        self._failure: str | None = None

    @property
    def exchange_address(self) -> int:
        """Where `struct exchange` lies, for a C function that makes this rank's calls.

        What it cannot finish is to be asked of `all_reduce` next, which goes on.
        """
        return self._state_address

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in pairs; in place if `x` is float32 or int32."""
        is_bf16 = x.dtype is torch.bfloat16
        x = x.contiguous() if is_bf16 else summed_as(x).contiguous()
        total = torch.empty(x.shape, dtype=torch.float32) if is_bf16 else x
        number = number_of(x.dtype)
        self._run(self._library.all_reduce, x.data_ptr(), total.data_ptr(), x.numel(), number)
        return total

    def gather_first(self, x: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Return the ranks' columns side by side on rank 0."""
        assert x.shape[1] == widths[self.rank], f"width {x.shape[1]} is not {widths[self.rank]}"
        x = x.contiguous()
        row_bytes = (ctypes.c_int64 * self.size)(*(width * x.element_size() for width in widths))
        joined = x.new_empty(x.shape[0], sum(widths)) if self.rank == 0 else None
        out = 0 if joined is None else joined.data_ptr()
        self._run(self._library.gather_first, x.data_ptr(), out, x.shape[0], row_bytes)
        return joined

    def close(self) -> None:
        """End the connections, which the other ranks notice at once."""
        self._failure = self._failure or "it has left"
        self._sockets.close()

    def _run(self, function: Callable[..., int], *arguments: object) -> None:
        if self._failure is not None:
            self._fail(self._failure)
        state = function(self._state_address, *arguments)
        if state != _DONE:
            self._wait(state, function, *arguments)

    def _wait(self, state: int, function: Callable[..., int], *arguments: object) -> None:
        """Call again until the others have come; each call waits about a millisecond."""
        deadline = time.monotonic() + self._sockets.timeout
        num_looks = 0
        lost: list[int] = []
        while state == _NOT_YET:
            # Who had left before the last look, and was missing in it, will never come.
            for rank in lost:
                if self._state.missing >> rank & 1:
                    self._fail(f"rank {rank} has left")
            if time.monotonic() > deadline:
                self._fail("timed out")
            lost = self._sockets.lost_ranks(_SLEEP if num_looks > _NUM_LOOKS else 0.0)
            num_looks += 1
            if self._failure is not None:  # closed by another thread
                self._fail(self._failure)
            state = function(self._state_address, *arguments)
        if state != _DONE:
            self._fail("the ranks do not make the same calls")

    def _fail(self, failure: str) -> NoReturn:
        """End the group for this rank: what C has kept of the call is of no use to another."""
        self._failure = failure
        raise GroupBroken(f"rank {self.rank} lost its group: {failure}")
