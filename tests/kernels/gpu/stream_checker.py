"""Two streams of a GPU that is none: raises where one touches what the other may still be at.

Follows which memory each stream has read and written since the other last waited for it, and whose
memory it is: torch gives memory back to the stream that took it, at once, unless it is told that
the other uses it as well. Launches are taken to write all that they are given.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime import interpreter

from kernels.gpu.copy_stream import CopyStream

Stream = Literal["steps", "copies"]


class Unordered(Exception):
    """A stream touches memory that the other may still be at, or that may be another's by now."""


class StreamChecker(TorchDispatchMode):
    """Checks all operations of this thread while it is entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now: Stream = "steps"
        # Storages that a stream has written, and read, since the other waited for it.
        self._written: dict[Stream, set[int]] = {"steps": set(), "copies": set()}
        self._read: dict[Stream, set[int]] = {"steps": set(), "copies": set()}
        self._owner: dict[int, Stream] = {}
        self._borrowed: set[int] = set()  # used by the stream whose memory it is not
        self._stale: set[Stream] = set()  # whose free memory the other may still be at
        self.num_checked: dict[Stream, int] = {"steps": 0, "copies": 0}  # operations
        run = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.utils._python_dispatch._get_current_dispatch_mode() is self:
                given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
                self._touch(given, given)
            with _disable_current_modes():
                return run(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check an operation, and do it."""
        schema = func._schema.arguments
        written = [
            value
            for value, argument in zip(args, schema, strict=False)
            if isinstance(value, Tensor) and argument.alias_info and argument.alias_info.is_write
        ]
        is_view = any(one.alias_info for one in func._schema.returns) and not written
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        if not is_view:
            self._touch(given, written)
        made = func(*args, **(kwargs or {}))
        for one in tree_flatten(made)[0]:
            if isinstance(one, Tensor):
                self._made(one.untyped_storage())
        return made

    def waits(self, stream: Stream, host: bool = False) -> None:
        """Note that a stream, or the host with it, waits for all that the other has queued."""
        other: Stream = "copies" if stream == "steps" else "steps"
        self._written[other].clear()
        self._read[other].clear()
        self._stale.discard(stream)
        if host:
            self._borrowed = {key for key in self._borrowed if self._owner[key] != stream}

    def mark(self, tensor: Tensor) -> None:
        """Note that memory is kept until the stream that has borrowed it is done with it."""
        self._borrowed.discard(tensor.untyped_storage()._cdata)

    def _touch(self, given: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        now = self.now
        self.num_checked[now] += 1
        other: Stream = "copies" if now == "steps" else "steps"
        writes = {one.untyped_storage()._cdata for one in written}
        for one in given:
            key = one.untyped_storage()._cdata
            self._know(one.untyped_storage(), "steps")
            if key in self._written[other] or (key in writes and key in self._read[other]):
                raise Unordered(f"{now} touch what {other} may still be at")
            (self._written if key in writes else self._read)[now].add(key)
            if self._owner[key] != now:
                self._borrowed.add(key)

    def _made(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._owner:
            return
        if self.now in self._stale:
            raise Unordered(f"{self.now} take memory again that the other stream may still be at")
        self._know(storage, self.now)
        self._written[self.now].add(storage._cdata)

    def _know(self, storage: torch.UntypedStorage, owner: Stream) -> None:
        if storage._cdata not in self._owner:
            self._owner[storage._cdata] = owner
            weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        if key in self._borrowed:
            self._stale.add(self._owner[key])
        self._borrowed.discard(key)
        del self._owner[key]
        for touched in (*self._written.values(), *self._read.values()):
            touched.discard(key)


class CheckedStream(CopyStream):
    """A stream as the checker sees it; `leaves_out` is a planted fault."""

    def __init__(self, checker: StreamChecker, leaves_out: str = "") -> None:
        super().__init__()
        self._checker = checker
        self._leaves_out = leaves_out

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """See `CopyStream`."""
        self._checker.now = "steps" if self._leaves_out == "beside" else "copies"
        try:
            yield
        finally:
            self._checker.now = "steps"

    def follow_steps(self, device: torch.device) -> None:
        """See `CopyStream`."""
        if self._leaves_out != "follow_steps":
            self._checker.waits("copies")

    def lead_steps(self, device: torch.device) -> None:
        """See `CopyStream`."""
        if self._leaves_out != "lead_steps":
            self._checker.waits("steps")

    def keep(self, tensor: Tensor) -> None:
        """See `CopyStream`."""
        if self._leaves_out != "keep":
            self._checker.mark(tensor)

    def lend(self, tensor: Tensor) -> None:
        """See `CopyStream`."""
        if self._leaves_out != "lend":
            self._checker.mark(tensor)

    def finish(self, device: torch.device) -> None:
        """See `CopyStream`."""
        if self._leaves_out != "finish":
            self._checker.waits("steps", host=True)
