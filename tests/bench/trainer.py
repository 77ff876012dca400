"""`python -m tests.bench.trainer`: a trainer that posts versions of an adapter beside its readers.

Every answer must be that of one version as a whole, and of no version that was replaced before it
was asked for; a version that is damaged must leave the one before it serving. What an answer of a
version is, is asked before, one at a time.
"""

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import httpx
import typer

from deploy.demo.many_adapters import make_many
from deploy.demo.model import demo_model
from tests.bench.adapters.server import BenchServer
from tests.bench.light_http import light_client
from tests.bench.process_tree import ProcessTree

NAME = "policy"
PROMPTS = ("Tell me about the sea.", "What is the capital of France?", "Who are you?")
MIN_CONTENTS = 4
DAMAGED_EVERY = 20  # versions


@dataclass(frozen=True)
class Content:
    """One adapter as it is posted, and what it answers to each prompt."""

    config: bytes
    weights: bytes
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """One answer, and when each of its events came."""

    text: str
    times: list[float]  # seconds of perf_counter
    last: int  # the number of the last version that had been begun when the first event came


@dataclass
class Found:
    """What was seen while the trainer posted, or did not."""

    gaps: list[float] = field(default_factory=list)  # seconds between tokens
    num_answers: int = 0
    num_conclusive: int = 0  # some contents were not allowed
    mixed: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


class Trainer:
    """Posts contents in turn, as versions that are numbered from 0."""

    def __init__(self, client: httpx.AsyncClient, contents: Sequence[Content]) -> None:
        self._client = client
        self._contents = contents
        self.num_begun = self.num_done = 0
        self.seconds: list[float] = []  # that each post took
        self.num_refused = 0  # damaged ones
        self.ended = 0.0  # when the last one was there, by perf_counter

    async def post(self, content: Content, name: str = NAME) -> None:
        """Post a version."""
        reply = await put(self._client, name, content.config, content.weights)
        reply.raise_for_status()

    async def run(self, interval: float, until: float) -> None:
        """Post a version every `interval` seconds, as far as they are taken."""
        due = time.perf_counter()
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += interval
            content = self._contents[self.num_begun % len(self._contents)]
            began = time.perf_counter()
            if self.num_begun % DAMAGED_EVERY == DAMAGED_EVERY - 1:
                reply = await put(self._client, NAME, content.config, content.weights[:-4])
                assert reply.status_code == 400, reply.text
                self.num_refused += 1
            self.num_begun += 1
            await self.post(content)
            self.num_done += 1
            self.ended = time.perf_counter()
            self.seconds.append(self.ended - began)

    def allowed(self, first: int, last: int) -> set[int]:
        """Return the contents of versions with these numbers, both included."""
        return {number % len(self._contents) for number in range(max(0, first), last + 1)}


async def put(
    client: httpx.AsyncClient, name: str, config: bytes, weights: bytes
) -> httpx.Response:
    """Upload an adapter."""
    headers = {b"X-Adapter-Config": config.replace(b"\n", b" ")}
    return await client.put(
        f"/v1/adapters/{name}?load_inplace=true", content=weights, headers=headers
    )


async def answer(
    client: httpx.AsyncClient,
    name: str,
    prompt: str,
    num_tokens: int,
    trainer: Trainer | None = None,
) -> Answer:
    """Return what is answered."""
    body = {
        "model": name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, last = "", -1
    times: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if not times and trainer is not None:
                    last = trainer.num_begun - 1
                times.append(time.perf_counter())
                text += "".join(one["delta"].get("content") or "" for one in event["choices"])
    return Answer(text, times, last)


async def distinct_contents(
    client: httpx.AsyncClient, folders: Sequence[Path], num_tokens: int
) -> list[Content]:
    """Return adapters that can be told apart by every answer."""
    contents: list[Content] = []
    for folder in folders:
        config = (folder / "adapter_config.json").read_bytes()
        weights = (folder / "adapter_model.safetensors").read_bytes()
        (await put(client, "golden", config, weights)).raise_for_status()
        answers = tuple(
            [(await answer(client, "golden", prompt, num_tokens)).text for prompt in PROMPTS]
        )
        if all(
            mine != theirs
            for content in contents
            for mine, theirs in zip(answers, content.answers, strict=True)
        ):
            contents.append(Content(config, weights, answers))
    assert len(contents) >= MIN_CONTENTS, f"only {len(contents)} can be told apart"
    await client.post("/v1/unload_lora_adapter", json={"lora_name": "golden"})
    return contents


async def read(
    client: httpx.AsyncClient,
    trainer: Trainer,
    contents: Sequence[Content],
    found: Found,
    until: float,
    prompts: Sequence[int],
    num_tokens: int,
) -> None:
    """Ask again and again, and look at each answer."""
    for prompt in itertools.cycle(prompts):
        if time.perf_counter() > until:
            return
        first = trainer.num_done - 1
        got = await answer(client, NAME, PROMPTS[prompt], num_tokens, trainer)
        text, times = got.text, got.times
        allowed = trainer.allowed(first, got.last)
        found.gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        found.num_answers += 1
        found.num_conclusive += len(allowed) < len(contents)
        match = [n for n, content in enumerate(contents) if content.answers[prompt] == text]
        if not match:
            found.mixed.append(text)
        elif match[0] not in allowed:
            found.stale.append(f"version {match[0]}, allowed {sorted(allowed)}")


async def measure(
    server: BenchServer,
    staging: Path,
    num_streams: int,
    num_tokens: int,
    per_minute: int,
    seconds: float,
) -> dict[str, Any]:
    """Return what is seen without and with a trainer."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = make_many(Path(scratch), 30)
        async with light_client(server.url) as client:
            contents = await distinct_contents(client, folders, num_tokens)
            trainer = Trainer(client, contents)
            await trainer.post(contents[-1])
            tree = ProcessTree(server.pid)

            async def phase(posts: bool, length: float) -> Found:
                found = Found()
                until = time.perf_counter() + length
                prompts = [range(i, i + len(PROMPTS)) for i in range(num_streams)]
                works = [
                    read(
                        client,
                        trainer,
                        contents,
                        found,
                        until,
                        [p % len(PROMPTS) for p in turn],
                        num_tokens,
                    )
                    for turn in prompts
                ]
                if posts:
                    works.append(trainer.run(60 / per_minute, until))
                await asyncio.gather(*works)
                return found

            trainer.num_begun = trainer.num_done = len(contents)  # the last one is what serves
            alone = await phase(False, seconds / 3)
            await phase(True, seconds / 3)  # memory settles
            before = tree.memory_bytes()
            posted_before, began = trainer.num_done, time.perf_counter()
            beside = await phase(True, seconds)
            elapsed = trainer.ended - began
            after = tree.memory_bytes()
            entry = server.adapter(NAME)
            await asyncio.sleep(3)
            return {
                "contents": len(contents),
                "versions_per_minute": (trainer.num_done - posted_before) / elapsed * 60,
                "versions": trainer.num_done,
                "damaged_refused": trainer.num_refused,
                "post_p50_ms": 1e3 * median(trainer.seconds),
                "post_p99_ms": 1e3 * quantiles(trainer.seconds, n=100)[-1],
                "answers": beside.num_answers,
                "conclusive": beside.num_conclusive,
                "mixed": alone.mixed + beside.mixed,
                "stale": alone.stale + beside.stale,
                "gap_p50_alone_ms": 1e3 * median(alone.gaps),
                "gap_p50_beside_ms": 1e3 * median(beside.gaps),
                "memory_before_mb": before / 2**20,
                "memory_after_mb": after / 2**20,
                "kept_versions": len(entry["versions"]),
                "staged": sum(len(path.name) == 64 for path in staging.iterdir()),
            }


def main(
    streams: Annotated[int, typer.Option(help="Answers at a time.")] = 16,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 24,
    per_minute: Annotated[int, typer.Option(help="Versions that the trainer tries to post.")] = 500,
    seconds: Annotated[float, typer.Option(help="That it posts, after a third of that.")] = 60.0,
    slots: Annotated[int, typer.Option(help="Adapter slots of each rank.")] = 24,
) -> None:
    """Measure a trainer beside streams on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        staging = Path(folder, "staging")
        flags = ("--tp", "1", "--max-loras", str(slots), "--adapter-staging", str(staging))
        with BenchServer("trainer", demo_model(), *flags) as server:
            result = asyncio.run(measure(server, staging, streams, tokens, per_minute, seconds))
    print(json.dumps(result, indent=2))
    assert not result["mixed"] and not result["stale"], "answers of the wrong version"


if __name__ == "__main__":
    typer.run(main)
