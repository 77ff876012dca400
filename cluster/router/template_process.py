"""Renders conversations by templates of strangers, each in a process that ends with it.

Started by `request_templates` as `python -m cluster.router.template_process MODEL_DIR SECONDS`. It
loads the tokenizer once and forks for each call, so that a template without an end, or one that
takes all memory, ends a process that nobody else needs, and leaves nothing behind.
"""

import gc
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from cluster.errors import InvalidRequest
from cluster.router.tokenizer import Tokenizer

MEMORY = 256 * 2**20  # bytes beside what the tokenizer takes
MAX_TEXT = 8 * 2**20  # bytes of what is rendered
_LENGTH = struct.Struct("<Q")


class Rendered(msgspec.Struct, frozen=True):
    """What came of one call."""

    text: str = ""
    error: str | None = None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Send bytes with their length before them."""
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next bytes, None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def serve(tokenizer: Tokenizer, seconds: float) -> None:
    """Answer each call on stdin with what came of it on stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    gc.freeze()
    write_frame(answers, msgspec.json.encode(Rendered()))  # that it is ready
    while (call := read_frame(sys.stdin.buffer)) is not None:
        write_frame(answers, _of_child(tokenizer, call, seconds, answers.fileno()))


def _of_child(tokenizer: Tokenizer, call: bytes, seconds: float, answers: int) -> bytes:
    """Return what came of a call; `answers` must end with this process, not with its child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.close(answers)
            _limit(seconds)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(msgspec.json.encode(_render(tokenizer, msgspec.json.decode(call))))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        is_slow = os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)
        reason = f"takes more than {seconds:g} s" if is_slow else "cannot be rendered"
        return msgspec.json.encode(Rendered(error=f"the chat template {reason}"))
    if not answer:
        return msgspec.json.encode(Rendered(error="the chat template cannot be rendered"))
    return answer


def _limit(seconds: float) -> None:
    """Let this process take so long, and little else."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render(tokenizer: Tokenizer, arguments: dict[str, Any]) -> Rendered:
    try:
        text = tokenizer.render(**arguments)
    except InvalidRequest as error:
        return Rendered(error=error.message[:1000])
    except MemoryError:
        return Rendered(error="the chat template takes too much memory")
    if len(text.encode(errors="replace")) > MAX_TEXT:
        return Rendered(error=f"the chat template renders more than {MAX_TEXT} bytes")
    return Rendered(text)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its router has gone
    serve(Tokenizer.load(Path(sys.argv[1])), float(sys.argv[2]))
