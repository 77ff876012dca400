"""`python -m tests.bench.strangers`: the worst bodies and broken adapters beside running streams.

Starts a server of its own. The longest gap of a stream alone, while four bodies of each kind come
at once, and while 200 loads do; what routers and pool hold before, at most and afterwards.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.demo.many_adapters import make_many
from deploy.demo.model import demo_model
from tests.bench.adapters.server import BASE, BenchServer
from tests.bench.strangers.adapters import make_broken
from tests.bench.strangers.bodies import bodies
from tests.bench.strangers.sender import READY
from tests.bench.strangers.watching import Memory, Watch, told

LOADS = "loads"
GAP_GOAL_MS = 200.0
RATIO_GOAL = 1.3  # of the 99th percentile of gaps, over that alone
MEMORY_GOAL_MB = 32.0  # that a part may hold more after the last pass than after the one before it
PASSES = 3  # what the first leaves behind is caches, stacks of threads, processes kept for the next
MEBIBYTE = 2**20
# A step takes longer the more tokens are before it, so each phase is to see all lengths many times.
STREAM_TOKENS = 200
ALONE_SECONDS = 20.0  # as long as 200 loads take, whose longest gap is compared with that alone
SETTLE_SECONDS = 5.0


class Bench:
    """One server, with what is sent to it in a folder."""

    def __init__(self, server: BenchServer, folder: Path, num_streams: int) -> None:
        self._server = server
        self._folder = folder
        self.memory = Memory(server.pid)
        self.watch = Watch(server.url, BASE, num_streams, STREAM_TOKENS)
        self.results: dict[str, Any] = {}

    def note(self, name: str, gaps: list[float]) -> None:
        """Note the gaps of all passes together."""
        median, high, longest = told(gaps)
        seen = self.results.get(name, {})
        self.results[name] = seen | {"p50": median, "p99": high, "longest": longest}

    @asynccontextmanager
    async def sender(
        self, calls: list[tuple[str, Path]]
    ) -> AsyncGenerator[asyncio.subprocess.Process]:
        """Start a process that sends calls at once when it is told to."""
        listed = self._folder / "calls"
        listed.write_text("".join(json.dumps([path, str(file)]) + "\n" for path, file in calls))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.strangers.sender", self._server.url, str(listed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        ready = (await process.stdout.readline()).decode().strip()
        assert ready == READY, ready
        yield process
        assert await process.wait() == 0

    async def send(self, calls: list[tuple[str, Path]]) -> dict[str, Any]:
        """Send calls at once; return what is said of the answers."""
        async with self.sender(calls) as process:
            return await _told_by(process)

    async def alone(self) -> list[float]:
        """Return the gaps of streams that nobody disturbs."""
        self.watch.forget()
        gaps = await self.watch.during(asyncio.sleep(ALONE_SECONDS))
        median, high, longest = told(gaps)
        print(f"{'alone':36} longest {longest:6.0f} ms  p99 {high:6.0f} ms  p50 {median:.0f} ms")
        return gaps

    async def phase(
        self, name: str, calls: list[tuple[str, Path]], alone: list[float]
    ) -> list[float]:
        """Send calls beside the streams and note what came of it; return the gaps."""
        answers: dict[str, Any] = {}
        async with self.sender(calls) as process:
            await asyncio.sleep(1.0)  # its start is over
            self.watch.forget()

            async def work() -> None:
                answers.update(await _told_by(process))

            gaps = await self.watch.during(work())
        median, high, longest = told(gaps)
        told_before = self.results.get(name)
        if told_before is None or told_before["longest"] < longest:  # the worst pass counts
            self.results[name] = {"p50": median, "p99": high, "longest": longest, **answers}
        ratio = high / told(alone)[1]
        common = max(answers["answers"], key=lambda answer: answers["answers"][answer])
        print(
            f"{name:36} longest {longest:6.0f} ms  p99 {high:6.0f} ms ({ratio:4.2f} of alone)  "
            f"answered in {answers['seconds']:5.1f} s: {len(answers['answers'])} kinds, "
            f"{common[:90]}",
            flush=True,
        )
        return gaps

    def body_calls(self, kind: str, path: str, body: bytes, count: int) -> list[tuple[str, Path]]:
        """Return calls of one body."""
        file = self._folder / f"body-{abs(hash(kind))}"
        file.write_bytes(body)
        return [(path, file)] * count

    def load_calls(self, count: int, good: list[Path]) -> list[tuple[str, Path]]:
        """Return loads: of the broken kinds in turn, and of a good adapter after each round."""
        broken = list(make_broken(good[0], self._folder).values())
        wanted = [*broken, *good]
        calls = []
        for number, folder in enumerate(islice(cycle(wanted), count)):
            file = self._folder / f"load-{number}"
            file.write_text(json.dumps({"lora_name": f"n{number}", "lora_path": str(folder)}))
            calls.append(("/v1/load_lora_adapter", file))
        return calls


async def _told_by(process: asyncio.subprocess.Process) -> dict[str, Any]:
    output, _ = await process.communicate(b"now\n")
    said: dict[str, Any] = json.loads(output)
    return said


async def measure(server: BenchServer, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return all that was measured."""
    bench = Bench(server, folder, options["streams"])
    streams = asyncio.create_task(bench.watch.run())
    looking = asyncio.create_task(bench.memory.follow())
    made = bodies(BASE)
    kinds = [kind for kind in made if not options["only"] or options["only"] in kind]
    good = make_many(folder / "good", 4)
    loads = bench.load_calls(options["loads"], good) if options["loads"] else []
    first = bench.body_calls("warm", "/tokenize", b'{"prompt":"' + b"a b " * 20_000 + b'"}', 4)
    try:
        await asyncio.sleep(3)
        await bench.send(first)  # the processes that read are there
        await asyncio.sleep(1)
        before = bench.memory.now()
        held, alone, beside_loads = [before], [], []
        for _ in range(PASSES):
            alone += await bench.alone()
            for kind in kinds:
                calls = bench.body_calls(kind, *made[kind], options["at_once"])
                await bench.phase(kind, calls, alone)
            if loads:
                beside_loads += await bench.phase(LOADS, loads, alone)
            assert not streams.done(), "the streams go on"
            await asyncio.sleep(SETTLE_SECONDS)
            held.append(bench.memory.now())
        bench.note("alone", alone)
        if loads:
            bench.note(LOADS, beside_loads)
        bench.results["memory"] = {
            part: {"held": [one[part] for one in held], "most": bench.memory.most[part]}
            for part in before
        }
    finally:
        for task in (streams, looking):
            task.cancel()
        await asyncio.gather(streams, looking, return_exceptions=True)
    return bench.results


def report(results: dict[str, Any]) -> None:
    """Print the table of goals."""
    memory = results.pop("memory")
    alone = results.pop("alone")
    of_loads = results.pop(LOADS, None)
    print(f"\n{'':44}{'goal':>10}{'figure':>12}")
    if results:
        worst = max(results, key=lambda kind: results[kind]["longest"])
        print(
            f"{'longest gap beside bodies, ms':44}{GAP_GOAL_MS:10.0f}"
            f"{results[worst]['longest']:12.0f}  ({worst}; alone {alone['longest']:.0f})"
        )
    for name in ("p50", "p99", "longest") if of_loads is not None else ():
        print(
            f"{f'{name} of gaps beside loads, over alone':44}{RATIO_GOAL:10.1f}"
            f"{of_loads[name] / alone[name]:12.2f}  ({of_loads[name]:.0f} ms)"
        )
    for part, told_of in memory.items():
        before, *after = (one / MEBIBYTE for one in told_of["held"])
        passes = ", ".join(f"{one:.0f}" for one in after)
        print(
            f"{f'memory of {part}, MB more after each pass':44}{MEMORY_GOAL_MB:10.0f}"
            f"{after[-1] - after[-2]:12.0f}  ({before:.0f} before, {passes} after the passes, "
            f"{told_of['most'] / MEBIBYTE:.0f} at most)"
        )


def main(
    streams: Annotated[int, typer.Option(help="Answers that run all the time.")] = 4,
    at_once: Annotated[int, typer.Option(help="Bodies of a kind at the same time.")] = 4,
    loads: Annotated[int, typer.Option(help="Loads of adapters at the same time.")] = 200,
    only: Annotated[str, typer.Option(help="Bodies with this in the name of their kind.")] = "",
    tp: Annotated[int, typer.Option(help="Ranks.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it.")] = None,
) -> None:
    """Measure a server of its own."""
    options = {"streams": streams, "at_once": at_once, "loads": loads, "only": only}
    flags = ("--tp", str(tp), "--max-loras", "8", "--routers", "1")
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchServer("strangers", demo_model(), *flags) as server,
    ):
        results = asyncio.run(measure(server, Path(folder), options))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2))
    report(results)


if __name__ == "__main__":
    typer.run(main)
