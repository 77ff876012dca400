"""Chat templates that come with requests, where `trust_request_chat_template` lets them.

They are rendered in another process, one after the other, because a stranger's template may never
end. That process is started by the first call, and again if it has died.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec

from cluster.errors import Internal, InvalidRequest, Overloaded
from cluster.router.template_process import Rendered, read_frame, write_frame

MAX_CALLS = 8  # that wait or run; each may take all of the time
_MODULE = "cluster.router.template_process"
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class RequestTemplates:
    """Renders conversations by templates that the model does not have."""

    def __init__(self, model_dir: str, seconds: float, retry_after: int) -> None:
        self._command = [sys.executable, "-m", _MODULE, model_dir, str(seconds)]
        self._retry_after = retry_after
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[Rendered | None]] = set()
        self._is_closed = False

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
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
        if self._calls:
            await asyncio.wait(self._calls)
        if self._process is not None:
            await asyncio.to_thread(self._end, self._process)

    async def _in_turn(self, arguments: dict[str, Any]) -> Rendered | None:
        async with self._turn:
            return await asyncio.to_thread(self._exchange, arguments)

    def _exchange(self, arguments: dict[str, Any]) -> Rendered | None:
        """Return what came of a call; None if the process has died."""
        if self._is_closed:
            return None
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            write_frame(process.stdin, msgspec.json.encode(arguments))
            answer = read_frame(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._end(process)
            return None
        return msgspec.json.decode(answer, type=Rendered)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(BrokenPipeError):
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _QUIET,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None, "a pipe"
        read_frame(process.stdout)  # that it is ready; if it died, the call finds out
        return process
