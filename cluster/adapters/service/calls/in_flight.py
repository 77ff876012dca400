"""The calls that the pool is at, so that it ends after them.

A pool is replaced while routers and schedulers call it: by one with another configuration, or on
another host. What has begun is done, or is told that it was not; what comes later is sent on.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from cluster.errors import Replaced, Unavailable

END_TIMEOUT = 1.5  # seconds that calls have to end by themselves; the replica gives the pool three
CUT_TIMEOUT = 0.5  # seconds until one that is cut off has told so

P = ParamSpec("P")
T = TypeVar("T")


class InFlightCalls:
    """Calls by the tasks that run them; `check_open` raises if none may begin."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open
        self._tasks: set[asyncio.Task[Any]] = set()
        self._are_cut = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def one(self, *, may_repeat: bool) -> Iterator[None]:
        """Run the body as a call, or as a part of the call that its task is at already.

        Args:
            may_repeat: whether the caller may be sent on to another pool in the middle of it.

        Raises:
            Replaced: if the pool has begun to end, or if it was cut off and may be repeated.
            Unavailable: if the pool is not open yet, or if it was cut off.
        """
        self._check_open()
        task = asyncio.current_task()
        assert task is not None, "calls are made on the pool's loop"
        if task in self._tasks:
            yield
            return
        self._tasks.add(task)
        self._is_idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._are_cut:
                raise
            task.uncancel()
            raise _cut_off(may_repeat=may_repeat) from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._is_idle.set()

    async def end(self) -> None:
        """Return when no call runs any more; those that take too long are cut off."""
        if await self._are_over(END_TIMEOUT):
            return
        self._are_cut = True
        for task in self._tasks:
            task.cancel()
        await self._are_over(CUT_TIMEOUT)

    async def _are_over(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        return self._is_idle.is_set()


def _cut_off(*, may_repeat: bool) -> Unavailable:
    if may_repeat:
        return Replaced("the adapter pool is replaced", retry_after=1)
    return Unavailable(
        "the adapter pool was replaced before this call was done: look at what is there, and "
        "call again",
        retry_after=1,
    )


class HasCalls(Protocol):
    """Whose methods are calls."""

    _calls: InFlightCalls


S = TypeVar("S", bound=HasCalls)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def pool_call(method: Method[S, P, T]) -> Method[S, P, T]:
    """Make a method a call that changes something; see `InFlightCalls.one`."""
    return _as_call(method, may_repeat=False)


def pool_query(method: Method[S, P, T]) -> Method[S, P, T]:
    """Make a method a call that may be repeated; see `InFlightCalls.one`."""
    return _as_call(method, may_repeat=True)


def _as_call(method: Method[S, P, T], *, may_repeat: bool) -> Method[S, P, T]:
    @wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calls.one(may_repeat=may_repeat):
            return await method(self, *args, **kwargs)

    return call
