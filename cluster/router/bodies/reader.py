"""Makes bodies into models: small ones at once, large ones in a process of their own.

What a router's loop does for a large body is to take it in, to pass it on, and to make what came
of it piece by piece. A body that is refused is never made here at all.
"""

import asyncio

import msgspec

from cluster.errors import ErrorInfo, Internal, error_from
from cluster.router.bodies.pieces import unpacked
from cluster.router.bodies.process import WRONG, Task, head_of
from cluster.router.bodies.room import BodyRoom
from cluster.router.bodies.validation import BodyT, validated
from cluster.router.sandbox.forking import ForkingProcess

SMALL_BODY = 64 * 1024  # bytes that are read at once
NUM_PROCESSES = 2  # each started when it is first needed
_MODULE = "cluster.router.bodies.process"


class BodyReader:
    """Reads the bodies of one router; `size` is what it holds of large ones, in bytes."""

    def __init__(self, size: int, retry_after: int) -> None:
        self.room = BodyRoom(size, retry_after)
        self._idle = [ForkingProcess(_MODULE) for _ in range(NUM_PROCESSES)]
        self.processes = tuple(self._idle)
        self._turns = asyncio.Semaphore(NUM_PROCESSES)
        self._tasks: set[asyncio.Task[bytes | None]] = set()

    async def read(self, data: bytes | bytearray, model: type[BodyT], max_values: int) -> BodyT:
        """Return JSON as a model.

        Raises:
            InvalidRequest: if it has more than `max_values` values, is not JSON, or not what the
                model takes.
        """
        if len(data) <= SMALL_BODY:
            return validated(data, model, max_values)
        head = head_of(Task(model.__module__, model.__qualname__, max_values))
        work = asyncio.create_task(self._exchange(head, data))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        # Who waits may go; the process is at it nevertheless, and the next body comes after it.
        answer = await asyncio.shield(work)
        if answer is None:
            raise Internal("the process that reads bodies has died")
        if answer.startswith(WRONG):
            raise error_from(msgspec.msgpack.decode(answer[1:], type=ErrorInfo))
        made = await unpacked(memoryview(answer)[1:])
        assert isinstance(made, model), f"a {type(made).__name__} came for a {model.__name__}"
        return made

    async def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for process in self.processes:
            await asyncio.to_thread(process.end)

    async def _exchange(self, head: bytes, data: bytes | bytearray) -> bytes | None:
        async with self._turns:
            process = self._idle.pop()  # the one used last: another is started when it is needed
            try:
                return await asyncio.to_thread(process.exchange, head, data)
            finally:
                self._idle.append(process)
