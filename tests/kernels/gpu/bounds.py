"""Makes Triton's interpreter refuse to touch memory outside of a kernel's arguments.

The interpreter follows any address: a read past the end gives what happens to lie there. Here each
lane of a load, store or atomic must lie in the storage of a tensor that the kernel was given, or of
one that the test has named because the kernel reaches it through a table of addresses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

Builder = interpreter.InterpreterBuilder
Executor = interpreter.GridExecutor

_one_at_a_time = RLock()  # the interpreter keeps the program's number in one place for all threads
_named: list[tuple[int, int]] = []  # [first, end) bytes
_arguments: list[tuple[int, int]] = []


class OutOfBounds(Exception):
    """A kernel touches memory that it was not given."""


@contextmanager
def reachable(*tensors: torch.Tensor) -> Iterator[None]:
    """Let kernels touch these tensors, which they find by address."""
    ranges = [_range(tensor) for tensor in tensors]
    _named.extend(ranges)
    try:
        yield
    finally:
        for one in ranges:
            _named.remove(one)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check(pointers: Any, mask: Any) -> None:
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    addresses = np.asarray(pointers.data).astype(np.uint64)
    if mask is not None:
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
    if not addresses.size:
        return
    ranges = (*_arguments, *_named)
    lowest, highest = int(addresses.min()), int(addresses.max()) + size
    if any(first <= lowest and highest <= end for first, end in ranges):
        return  # nearly always: all lanes lie in one tensor
    inside = np.zeros(addresses.shape, bool)
    for first, end in ranges:
        inside |= (addresses >= first) & (addresses + np.uint64(size) <= end)
    num_outside = int((~inside).sum())
    if num_outside:
        raise OutOfBounds(f"{num_outside} of {addresses.size} lanes out of bounds")


def install() -> None:
    """Check every access from here on, for the life of the process."""
    if Executor.__call__.__name__ == "checked_call":
        return
    load, store = Builder.create_masked_load, Builder.create_masked_store
    atomic, call = Builder.create_atomic_rmw, Executor.__call__
    init_arguments = Executor._init_args_hst

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **how: Any) -> Any:
        _check(pointers, mask)
        return load(self, pointers, mask, *rest, **how)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask)
        return atomic(self, op, pointers, value, mask, *rest)

    def noted_arguments(self: Any, positional: Any, keywords: Any) -> Any:
        given = [*positional, *keywords.values()]
        tensors = [one.base if isinstance(one, TensorDescriptor) else one for one in given]
        _arguments[:] = [_range(one) for one in tensors if isinstance(one, torch.Tensor)]
        return init_arguments(self, positional, keywords)

    def checked_call(self: Any, *positional: Any, **keywords: Any) -> Any:
        try:
            # Integers wrap, and infinities cancel out, without a word: as on a GPU.
            with _one_at_a_time, np.errstate(all="ignore"):
                return call(self, *positional, **keywords)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, OutOfBounds):
                raise error.__cause__ from None
            raise

    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.create_atomic_rmw = checked_atomic
    Executor._init_args_hst, Executor.__call__ = noted_arguments, checked_call
