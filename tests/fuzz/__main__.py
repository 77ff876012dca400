"""Sends calls that no client makes to a server of its own; after each hundred asks a golden one.

    python -m tests.fuzz [--cases 2000] [--bodies 5000] [--seed 1] [--schemathesis PATH]

A failure is a status from 500 on that is no 503 with its reason, a call that is not answered, or a
golden answer that is not what it was before. Ends with 1 if there was one.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.server import MODELS, Server
from tests.fuzz.calls import Hostile, hostile_calls
from tests.in_background import InBackground

MODEL = MODELS[0]
PATIENCE = 120.0  # seconds for an answer: what takes longer hangs
AT_ONCE = 4
GOLDEN_EVERY = 100
GOLDEN: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": True,
    "return_token_ids": True,
}
# Endless, or made to keep others out.
LEFT_OUT = ("/v1/kv_events", "/v1/drain")


def golden_answer(client: httpx.Client) -> Any:
    """Return what must be the same whatever else is asked."""
    choices = client.post("/v1/chat/completions", json=GOLDEN).raise_for_status().json()["choices"]
    return choices


class Longest(InBackground):
    """The longest that a call which computes nothing waits, asked ten times a second meanwhile."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.seconds = 0.0
        self._url = url

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as client:
            while not self.stopping.wait(0.1):
                begin = time.monotonic()
                client.get("/version")
                self.seconds = max(self.seconds, time.monotonic() - begin)


def is_failure(status: int, text: str) -> bool:
    """Tell whether a response is none that a mistake of a caller may have."""
    return status >= 500 and not (status == 503 and ("message" in text or "reasons" in text))


def send(client: httpx.Client, call: Hostile) -> tuple[Hostile, str, str]:
    """Make a call; return it with its status and, if it failed, why."""
    try:
        reply = client.request(call.method, call.path, content=call.content, headers=call.headers)
    except httpx.TimeoutException:
        return call, "none", "no answer"
    except httpx.HTTPError as error:  # it did not read all of a body that is too large
        return call, type(error).__name__, ""
    told = reply.text[:300]
    return call, str(reply.status_code), told if is_failure(reply.status_code, reply.text) else ""


def run_bodies(url: str, count: int, seed: int, golden: Any) -> list[str]:
    """Send hostile bodies; return what went wrong."""
    failures: list[str] = []
    statuses: Counter[str] = Counter()
    calls = hostile_calls(seed, MODEL)
    with (
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(AT_ONCE) as threads,
        Longest(url) as longest,
    ):
        for number in range(0, count, GOLDEN_EVERY):
            some = list(itertools.islice(calls, min(GOLDEN_EVERY, count - number)))
            for call, status, why in threads.map(lambda call: send(client, call), some):
                statuses[status] += 1
                if why:
                    asked = f"{call.method} {call.path} {call.content[:400]!r}"
                    failures.append(f"{call.kind}: {status}: {why}: {asked}")
            if golden_answer(client) != golden:
                failures.append(f"another golden answer after {number + len(some)} bodies")
            print(f"{number + len(some)} bodies: {dict(statuses)}", flush=True)
    print(f"the longest wait of a call that computes nothing: {longest.seconds:.2f} s")
    return failures


def run_schemathesis(program: Path, url: str, cases: int, seed: int, golden: Any) -> list[str]:
    """Let schemathesis make cases of the OpenAPI document; return what went wrong."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as kept:
        json.dump({"golden": golden, "asked": GOLDEN, "url": url, "every": GOLDEN_EVERY}, kept)
        kept.flush()
        checks = "not_a_server_error,status_code_conformance,content_type_conformance"
        command = [str(program), "run", f"{url}/openapi.json", "--checks"]
        command += [f"{checks},response_schema_conformance", "--seed", str(seed)]
        command += ["--max-examples", str(max(1, cases // 35)), "--request-timeout", "120"]
        command += ["--phases", "fuzzing", "--continue-on-failure"]
        for path in LEFT_OUT:
            command += ["--exclude-path", path]
        hooks = {"SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "TOPWORK_FUZZ": kept.name}
        ended = subprocess.run(command, env={**os.environ, **hooks})
    return [f"schemathesis ended with {ended.returncode}"] if ended.returncode else []


def main() -> int:
    """Run both; return how the process ends."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="hostile calls")
    parser.add_argument("--cases", type=int, default=2000, help="of schemathesis, at least")
    parser.add_argument("--bodies", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schemathesis", type=Path, help="its program; without it no cases")
    options = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "log.txt", "--trust-request-chat-template")
        try:
            server.wait_until_ready()
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
                golden = golden_answer(client)
            if options.bodies:
                failures += run_bodies(server.url, options.bodies, options.seed, golden)
            if options.cases and options.schemathesis is not None:
                program, seed = options.schemathesis, options.seed
                failures += run_schemathesis(program, server.url, options.cases, seed, golden)
        finally:
            server.stop()
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
