"""What a shared prompt costs the second time: time to first token cold and warm, per adapter."""

import json
import time
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class _Reply:
    seconds: float  # to the first token
    cached_tokens: int


def bench_prefix(
    url: str, models: tuple[str, ...], prefix_len: int, vocab_size: int, console: Console
) -> None:
    """Ask each model twice with one long prefix and print both times and their ratio."""
    load = Workload(
        name=f"prefix {time.time_ns()}",  # a prompt that no earlier run has left in the cache
        models=models,
        concurrency=1,
        num_requests=2 * len(models),
        input_len=prefix_len + 32,
        output_len=1,
        shared_prefix_len=prefix_len,
        vocab_size=vocab_size,
    )
    table = Table("model", "cold ms", "warm ms", "cold / warm", "cached of warm")
    replies: dict[str, list[_Reply]] = {}
    with httpx.Client(base_url=url, timeout=600.0) as client:
        for ask in load.asks(1):
            replies.setdefault(ask.model, []).append(_ask(client, ask.model, ask.token_ids))
    for model, (cold, warm) in replies.items():
        table.add_row(
            model,
            f"{1000 * cold.seconds:.0f}",
            f"{1000 * warm.seconds:.0f}",
            f"{cold.seconds / warm.seconds:.1f}",
            f"{warm.cached_tokens} of {load.input_len}",
        )
    console.print(table)


def _ask(client: httpx.Client, model: str, token_ids: tuple[int, ...]) -> _Reply:
    body = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, cached = time.perf_counter(), None, 0
    with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"] and first is None:
                first = time.perf_counter()
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first is not None, "the server sent no token"
    return _Reply(first - sent, cached)
