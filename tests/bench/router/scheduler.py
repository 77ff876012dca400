"""The pretended scheduler, a process of its own: one token for each stream every few milliseconds.

`python -m tests.bench.router.scheduler MODEL_DIR TOKENS STEP_MS` says where it listens.
"""

import asyncio
import sys
from pathlib import Path

import msgspec

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer

TEXT = (
    "The grafted branch bears the fruit of the tree it was cut from, and drinks from roots that "
    "were never its own. A gardener who knows this keeps one strong stock, and many scions. "
)


async def _serve(tokens: tuple[int, ...], step_seconds: float) -> None:
    scheduler = FakeScheduler(lambda _: Script(tokens=tokens), step_seconds=step_seconds)
    address = await scheduler.start()
    sys.stdout.buffer.write(msgspec.json.encode(address) + b"\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    directory, num_tokens, step_ms = sys.argv[1:]
    once = Tokenizer.load(Path(directory)).encode(TEXT, False)
    tokens = (once * (int(num_tokens) // len(once) + 1))[: int(num_tokens)]
    asyncio.run(_serve(tokens, float(step_ms) / 1000))
