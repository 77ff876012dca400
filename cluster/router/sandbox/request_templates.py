"""Chat templates that come with requests, where `trust_request_chat_template` lets them.

They are rendered in another process, one after the other, because a stranger's template may never
end. That process is started by the first call, and again if it has died.
"""

import asyncio
from typing import Any

import msgspec

from cluster.errors import Internal, InvalidRequest, Overloaded
from cluster.router.sandbox.forking import ForkingProcess
from cluster.router.sandbox.template_process import Rendered

MAX_CALLS = 8  # that wait or run; each may take all of the time
_MODULE = "cluster.router.sandbox.template_process"


class RequestTemplates:
    """Renders conversations by templates that the model does not have."""

    def __init__(self, model_dir: str, seconds: float, retry_after: int) -> None:
        self.process = ForkingProcess(_MODULE, model_dir, str(seconds))
        self._retry_after = retry_after
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[Rendered | None]] = set()

    async def render(self, arguments: dict[str, Any]) -> str:
        """Return what `Tokenizer.render` makes of these arguments.

        Raises:
            InvalidRequest: if the template is none, refuses, or takes too much.
            Overloaded: if too many such calls wait.
        """
        if len(self._calls) >= MAX_CALLS:
            raise Overloaded(
                f"{MAX_CALLS} calls with a chat_template of their own are being rendered",
                retry_after=self._retry_after,
            )
        work = asyncio.create_task(self._in_turn(arguments))
        self._calls.add(work)
        work.add_done_callback(self._calls.discard)
        # Who waits may go; the process is at it nevertheless, and the next call comes after it.
        rendered = await asyncio.shield(work)
        if rendered is None:
            raise Internal("the process that renders chat templates has died")
        if rendered.error is not None:
            raise InvalidRequest(rendered.error, "chat_template")
        return rendered.text

    async def close(self) -> None:
        """End the process."""
        self.process.kill()
        if self._calls:
            await asyncio.wait(self._calls)
        await asyncio.to_thread(self.process.end)

    async def _in_turn(self, arguments: dict[str, Any]) -> Rendered | None:
        call = msgspec.json.encode(arguments)
        async with self._turn:
            answer = await asyncio.to_thread(self.process.exchange, call)
        return None if answer is None else msgspec.json.decode(answer, type=Rendered)
