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


READ_ON_FOR = 60.0  # seconds that a broken stream is tried again


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
    num_breaks: int = 0  # of its connection
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
            "max_tokens": random.randint(120, 240),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "resumable": True},
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


def answer_of(client: httpx.Client, ask: Ask, patience: float = READ_ON_FOR) -> Answer:
    """Make a call and read it to the end; where its connection breaks, read on elsewhere."""
    answer = Answer()
    reader = _Reader(answer)
    reader.read(client, "POST", "/v1/completions", json=ask.body)
    deadline = time.monotonic() + patience
    while reader.is_broken and reader.last_id and time.monotonic() < deadline:
        time.sleep(0.2)
        stream_id = reader.last_id.rpartition(":")[0]
        answer.num_breaks += 1
        headers = {"Last-Event-ID": reader.last_id}
        reader.read(client, "GET", f"/v1/streams/{stream_id}", headers=headers)
    return answer


class _Reader:
    """Reads a stream, by one connection after the other."""

    def __init__(self, answer: Answer) -> None:
        self.is_broken = False
        self.last_id = ""
        self._answer = answer
        self._last = time.monotonic()

    def read(self, client: httpx.Client, method: str, path: str, **words: Any) -> None:
        answer = self._answer
        self.is_broken, answer.error = True, ""
        try:
            with client.stream(method, path, **words) as reply:
                if reply.status_code != 200:
                    answer.error = f"{reply.status_code}: {reply.read().decode()}"
                    self.is_broken = reply.status_code in (502, 503, 504) or bool(self.last_id)
                    return
                answer.status = 200
                for line in reply.iter_lines():
                    self._take_line(line)
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"

    def _take_line(self, line: str) -> None:
        if line.startswith("id: "):
            self.last_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            self.is_broken = False
        elif line.startswith("data: "):
            now = time.monotonic()
            self._answer.longest_gap = max(self._answer.longest_gap, now - self._last)
            self._last = now
            _take(self._answer, json.loads(line.removeprefix("data: ")))


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
