"""Clients that make the same calls over and over, and compare all answers with undisturbed ones."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.chaos.traffic import Answer, Ask, answer_of, make_asks
from tests.end_to_end.asking import Endpoint, wait_for


def mixed_asks(models: list[str], count: int, seed: int) -> list[Ask]:
    """Return streams of all kinds, every other resumable, and a short whole call for each two."""
    asks = [
        Ask(one.number, one.body | {"stream_options": _options(one.number)})
        for one in make_asks(models, count, seed)
    ]
    for number in range(count, count + count // 2):
        model = models[number % len(models)]
        body = {"model": model, "prompt": f"{number}: a short one", "max_tokens": 6, "seed": number}
        asks.append(Ask(number, body | {"temperature": 0.7, "ignore_eos": True}))
    return asks


def _options(number: int) -> dict[str, Any]:
    return {"include_usage": True, "resumable": number % 4 < 2}


def is_whole(ask: Ask) -> bool:
    """Tell whether a call is answered in one piece."""
    return "stream" not in ask.body


def answered(client: httpx.Client, ask: Ask) -> Answer:
    """Make a call and take its answer, streamed or whole."""
    return _whole(client, ask) if is_whole(ask) else answer_of(client, ask)


def _whole(client: httpx.Client, ask: Ask) -> Answer:
    answer = Answer()
    try:
        reply = client.post("/v1/completions", json=ask.body)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
        return answer
    if reply.status_code != 200:
        answer.error = f"{reply.status_code}: {reply.text}"
        return answer
    answer.status = 200
    told = reply.json()
    for choice in told["choices"]:
        answer.texts[choice["index"]] = choice["text"]
        answer.finish[choice["index"]] = choice["finish_reason"]
    answer.usage = told["usage"]
    return answer


def undisturbed(server: Endpoint, asks: list[Ask]) -> list[Answer]:
    """Return the answers of a server that is left alone."""
    with server.client() as client, ThreadPoolExecutor(len(asks)) as threads:
        answers = list(threads.map(lambda ask: answered(client, ask), asks))
    assert [one.error for one in answers] == [""] * len(asks)
    return answers


class Steady:
    """One client for each call, which makes it again and again until told to stop.

    A stream that breaks is a failure, even if it could be read on.
    """

    def __init__(self, server: Endpoint, asks: list[Ask], expected: list[Answer]) -> None:
        self.failures: list[str] = []
        self.num_streams = 0  # that have ended as they should
        self.num_whole = 0  # calls
        self.longest_gap = 0.0  # seconds between two chunks
        self._server = server
        self._may_refuse = False  # a call that was about to be made when it was told to stop
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(ask, answer))
            for ask, answer in zip(asks, expected, strict=True)
        ]

    def __enter__(self) -> "Steady":
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.num_whole > 2 or bool(self.failures))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def stop(self, *, may_refuse: bool = False) -> None:
        """Make no more calls; those that run go on, and the last ones may be refused."""
        self._may_refuse |= may_refuse
        self._stopping.set()

    def wait_for_more(self, count: int) -> None:
        """Wait until so many more streams have ended."""
        goal = self.num_streams + count
        wait_for(lambda: self.num_streams >= goal or bool(self.failures))

    def _run(self, ask: Ask, expected: Answer) -> None:
        while not self._stopping.is_set():
            # A connection for each call: the hardest case for whoever comes and goes.
            with self._server.client() as client:
                self._take(ask, answered(client, ask), expected)

    def _take(self, ask: Ask, answer: Answer, expected: Answer) -> None:
        with self._lock:
            self.longest_gap = max(self.longest_gap, answer.longest_gap)
            if self._may_refuse and not answer.status and answer.error.startswith("503: "):
                return
            if answer.error or answer.num_breaks:
                told = answer.error or "it was read on"
                self.failures.append(f"call {ask.number} broke: {told[:300]}")
            elif answer.content != expected.content:
                told = f"{answer.content} instead of {expected.content}"
                self.failures.append(f"call {ask.number} differs: {told[:900]}")
            elif is_whole(ask):
                self.num_whole += 1
            else:
                self.num_streams += 1
