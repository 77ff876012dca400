"""Renders conversations by templates of strangers; see `forking`.

`request_templates` starts `python -m cluster.router.sandbox.template_process MODEL_DIR SECONDS`.
"""

import sys
from pathlib import Path

import msgspec

from cluster.errors import InvalidRequest
from cluster.router.sandbox.forking import Limits, serve
from cluster.router.tokenizer import Tokenizer

MAX_TEXT = 8 * 2**20  # bytes of what is rendered


class Rendered(msgspec.Struct, frozen=True):
    """What came of one call."""

    text: str = ""
    error: str | None = None


def main(model_dir: Path, seconds: float) -> None:
    """Render what comes on stdin."""
    tokenizer = Tokenizer.load(model_dir)

    def work(call: bytes) -> bytes:
        return msgspec.json.encode(_render(tokenizer, call))

    def lost(is_slow: bool) -> bytes:
        reason = f"takes more than {seconds:g} s" if is_slow else "cannot be rendered"
        return msgspec.json.encode(Rendered(error=f"the chat template {reason}"))

    serve(work, lost, Limits(seconds))


def _render(tokenizer: Tokenizer, call: bytes) -> Rendered:
    try:
        text = tokenizer.render(**msgspec.json.decode(call))
    except InvalidRequest as error:
        return Rendered(error=error.message[:1000])
    except MemoryError:
        return Rendered(error="the chat template takes too much memory")
    if len(text.encode(errors="replace")) > MAX_TEXT:
        return Rendered(error=f"the chat template renders more than {MAX_TEXT} bytes")
    return Rendered(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
