"""Has a tokenizer looked at by a process of its own, beside what is done here."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

_PROBE = "deploy.checks.tokenizer_probe"
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Finding(msgspec.Struct, frozen=True):
    """What is wrong with a tokenizer; None for nothing."""

    error: str | None = None  # it cannot be served
    warning: str | None = None


@contextmanager
def looking_at_tokenizer(
    model_dir: Path, vocab_size: int, timeout: float
) -> Iterator[Callable[[], Finding]]:
    """Start to look at the tokenizer of a model; what is given waits for what is found.

    The process has ended when the context is left.
    """
    with subprocess.Popen(
        [sys.executable, "-m", _PROBE, str(model_dir), str(vocab_size)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | _QUIET,
        start_new_session=True,  # Ctrl-C ends the command, which then ends this process
    ) as process:
        try:
            yield lambda: _result(process, timeout)
        finally:
            process.kill()


def _result(process: subprocess.Popen[bytes], timeout: float) -> Finding:
    try:
        answer, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finding(f"to load and to try it takes more than {timeout:g} s")
    try:
        return msgspec.json.decode(answer.rpartition(b"\n")[2], type=Finding)
    except msgspec.DecodeError:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return Finding(f"the process that loads it has ended: {_end(process, last)}")


def _end(process: subprocess.Popen[bytes], last_line: str) -> str:
    """Return how a process ended, and what it said last."""
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}, {last_line}" if last_line else how
