"""Calls whose grammar the ranks have not compiled: held back until they have.

A grammar may take a second to compile. It is done beside the steps, so that the streams of others
go on, and the scheduler learns of the call when no step need wait for it any more.
"""

import asyncio
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.engine.executor import Executor
from cluster.engine.server import RouterConnection
from cluster.messages import Keep
from cluster.request import Request, has_part

NUM_KNOWN = 32  # grammars that were asked for last; ranks keep twice as many
TIMEOUT = 5.0  # seconds; then the call goes on as it is, and a rank that hangs is found out


@dataclass(eq=False)
class _Held:
    """The choices of one prompt, without those that were dropped meanwhile."""

    router: RouterConnection
    requests: tuple[Request, ...]
    keep: Keep | None
    submit: Callable[[tuple[Request, ...]], None]
    behind: list[Callable[[], None]] = field(default_factory=list)  # what must be done after it


class GrammarGate:
    """Lets calls through, some of them later; `wake` makes the step loop look again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        # That knows these. One that is lost is not kept: its failure's frames hold shards.
        self._executor: weakref.ref[Executor] | None = None
        self._known: dict[str, None] = {}  # the last used behind
        self._held: dict[asyncio.Task[None], _Held] = {}

    @property
    def num_held(self) -> int:
        """Requests that wait."""
        return sum(len(held.requests) for held in self._held.values())

    def submit(
        self,
        executor: Executor | None,
        router: RouterConnection,
        requests: tuple[Request, ...],
        keep: Keep | None,
        submit: Callable[[tuple[Request, ...]], None],
    ) -> None:
        """Call `submit` with the choices of a prompt, when their grammar is compiled."""
        grammar = requests[0].sampling.grammar
        if not self._is_current(executor):
            self._executor = None if executor is None else weakref.ref(executor)
            self._known.clear()
        if not grammar or executor is None or grammar in self._known:
            if grammar in self._known:
                self._know(grammar)
            submit(requests)
            return
        held = _Held(router, requests, keep, submit)
        task = asyncio.create_task(self._let_through_later(executor, grammar, held))
        self._held[task] = held
        task.add_done_callback(self._end)

    def abort(self, router: RouterConnection, request_id: str) -> bool:
        """Drop a request that is held back; False if there is none."""
        for task, held in self._held.items():
            left = tuple(one for one in held.requests if one.request_id != request_id)
            if held.router is router and len(left) < len(held.requests):
                held.requests = left
                if not left:
                    task.cancel()
                return True
        return False

    def abort_all(self, router: RouterConnection, gone: Callable[[], None]) -> None:
        """Drop what is held back of a router that has gone; call `gone` behind calls to keep."""
        for task, held in self._held.items():
            if held.router is not router:
                continue
            if held.keep is None:
                task.cancel()
            else:
                held.behind.append(gone)

    def behind(self, stream_id: str, work: Callable[[], None]) -> None:
        """Do work that concerns a call that is kept, when it is through if it is held back."""
        for held in self._held.values():
            if held.keep is not None and held.keep.stream_id == stream_id:
                held.behind.append(work)
                return
        work()

    def holds(self, digest: str) -> bool:
        """Tell whether a call of an adapter, or of a sum with it, is held back."""
        return any(
            has_part(request.adapter, digest)
            for held in self._held.values()
            for request in held.requests
        )

    def close(self) -> None:
        """Drop all that is held back."""
        for task in self._held:
            task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self._wake()

    async def _let_through_later(self, executor: Executor, grammar: str, held: _Held) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await executor.prepare_grammar(grammar)
            if self._is_current(executor):
                self._know(grammar)
        except TimeoutError:
            pass  # steps have time-outs of their own
        held.submit(held.requests)
        for work in held.behind:
            work()

    def _is_current(self, executor: Executor | None) -> bool:
        return (None if self._executor is None else self._executor()) is executor

    def _know(self, grammar: str) -> None:
        self._known.pop(grammar, None)
        self._known[grammar] = None
        if len(self._known) > NUM_KNOWN:
            del self._known[next(iter(self._known))]
