"""Mixed streams whose answers must not depend on what happens to the server meanwhile."""

import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

QUESTIONS = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):",
    "Three things that a gardener should know:",
    "The train left the station at noon and",
)


@dataclass(frozen=True)
class Ask:
    """One streamed call."""

    number: int
    body: dict[str, Any]


@dataclass
class Answer:
    """What came of a call: per choice, and when."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    longest_gap: float = 0.0  # seconds between two chunks, the first counted from the call

    @property
    def content(self) -> tuple[object, ...]:
        """Return all that must be the same again; what was cached is no part of it."""
        counts = {name: value for name, value in self.usage.items() if name.endswith("_tokens")}
        return self.status, self.texts, self.token_ids, self.logprobs, self.finish, counts


def make_asks(models: list[str], count: int, seed: int) -> list[Ask]:
    """Return calls of all kinds: base and adapters, greedy and drawn, choices, logprobs."""
    random = Random(seed)
    asks = []
    for number in range(count):
        body: dict[str, Any] = {
            "model": models[number % len(models)],
            "prompt": f"{number}: {random.choice(QUESTIONS)}",
            "max_tokens": random.randint(60, 160),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "temperature": 0.0,
        }
        if number % 2:
            body |= {"temperature": 0.8, "seed": number, "top_p": random.choice([1.0, 0.9])}
        if number % 4 == 1:
            body["n"] = 2
        if number % 3 == 0:
            body["logprobs"] = 2
        if number % 5 == 4:
            body |= {"stop": ["\n\n", "the end of"], "repetition_penalty": 1.1}
        asks.append(Ask(number, body))
    return asks


def answer_of(client: httpx.Client, ask: Ask) -> Answer:
    """Make a call and read it to the end, whatever that is."""
    answer, last = Answer(), time.monotonic()
    try:
        with client.stream("POST", "/v1/completions", json=ask.body) as reply:
            answer.status = reply.status_code
            if reply.status_code != 200:
                answer.error = reply.read().decode()
                return answer
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.monotonic()
                answer.longest_gap, last = max(answer.longest_gap, now - last), now
                _take(answer, json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = json.dumps(chunk["error"])
        return
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        answer.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
        logprobs = choice.get("logprobs") or {}
        answer.logprobs.setdefault(index, []).extend(logprobs.get("token_logprobs") or ())
        if choice["finish_reason"]:
            answer.finish[index] = choice["finish_reason"]
