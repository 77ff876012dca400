"""Fails a test in which the host waits for the device while a step is started.

On a CPU nothing has to be waited for, so the ways to wait are refused by name: to look at a number
of a tensor, to ask for something whose size depends on numbers, and to send numbers otherwise than
through `kernels.gpu.async_copy`, which would wait until they are there. The interpreter may look:
it is the device.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from worker.engine.rank import Rank

_SIZED_BY_NUMBERS = {"nonzero", "masked_select", "bincount", "unique_dim", "_unique2", "unique"}
_LOOKS = {"_local_scalar_dense", "equal", *_SIZED_BY_NUMBERS}
# On a CPU, torch takes a short way for these that no dispatch mode sees.
_METHODS = ("tolist", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")
_SENDERS = ("tensor", "as_tensor", "from_numpy")
_MAY_SEND = "kernels/gpu/async_copy.py"
_HAS_HOST_TENSORS = "kernels/lora.py"  # where the blocks of a LoRA begin

_thread = threading.local()


class Waited(Exception):
    """Something looked at the device while a step was started."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _LOOKS:
            raise Waited(name)
        if name in ("index", "index_put", "index_put_") and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        ):
            raise Waited(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def _set(is_watched: bool) -> Iterator[None]:
    before = getattr(_thread, "is_watched", False)
    _thread.is_watched = is_watched
    try:
        yield
    finally:
        _thread.is_watched = before


def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Refuse them in `Rank.start` from here on; returns a list that grows with the steps seen."""
    seen: list[int] = []
    start, run = Rank.start, interpreter.GridExecutor.__call__

    def watched_start(rank: Rank, frame: bytes) -> Any:
        with _Watch(), _set(True):
            started = start(rank, frame)
        seen.append(len(seen))
        return started

    def unwatched_run(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), _set(False):
            return run(executor, *args, **kwargs)

    monkeypatch.setattr(Rank, "start", watched_start)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched_run)
    for name in _METHODS:
        _refuse(monkeypatch, torch.Tensor, name, but_in=_HAS_HOST_TENSORS)
    for name in _SENDERS:
        _refuse(monkeypatch, torch, name, but_in=_MAY_SEND)
    for name in ("__getitem__", "__setitem__"):
        _refuse_lists(monkeypatch, name)
    return seen


def _refuse(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, but_in: str) -> None:
    inner: Callable[..., Any] = getattr(owner, name)

    def refused(*args: Any, **kwargs: Any) -> Any:
        where = sys._getframe(1).f_code.co_filename
        if getattr(_thread, "is_watched", False) and not where.endswith(but_in):
            raise Waited(f"{name} in {where}")
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, refused)


def _refuse_lists(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Refuse to index a tensor by a list, which is sent there first."""
    inner: Callable[..., Any] = getattr(torch.Tensor, name)

    def refused(tensor: torch.Tensor, index: Any, *value: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if getattr(_thread, "is_watched", False) and any(isinstance(one, list) for one in parts):
            raise Waited(f"{name} by a list")
        return inner(tensor, index, *value)

    monkeypatch.setattr(torch.Tensor, name, refused)
