"""Adapters that are loaded, asked and unloaded over and over while processes die."""

from pathlib import Path
from typing import Any

import httpx

from tests.in_background import InBackground

TIMEOUT = 180.0  # seconds without an answer, far beyond any pause
RETRY_SECONDS = 0.2
NUM_NAMES = 3


class Churn(InBackground):
    """One client that loads an adapter under changing names and compares what it answers.

    Calls that are refused for the moment, or whose connection breaks, are made again; whatever else
    is not as it should be is a failure.
    """

    def __init__(self, url: str, original: str, directory: Path) -> None:
        """Take the answer that the adapter gives undisturbed.

        Args:
            url: of the server.
            original: name of the adapter that is served from the directory all the time.
            directory: of the adapter.
        """
        super().__init__()
        self.failures: list[str] = []
        self.num_loads = 0
        self._url = url
        self._directory = directory
        self._expected = self._ask(original).json()["choices"][0]["text"]

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            name = f"churn-{number % NUM_NAMES}"
            body = {"lora_name": name, "lora_path": str(self._directory), "load_inplace": True}
            self._expect(self._call("/v1/load_lora_adapter", body), name, {200})
            answer = self._ask(name)
            self._expect(answer, name, {200})
            if answer.status_code == 200:
                text = answer.json()["choices"][0]["text"]
                if text != self._expected:
                    self.failures.append(f"{name}: {text!r} instead of {self._expected!r}")
            # A call whose answer was lost may have been heard: the second finds nothing.
            gone = self._call("/v1/unload_lora_adapter", {"lora_name": name})
            self._expect(gone, name, {200, 404} if gone.extensions["calls"] > 1 else {200})
            self.num_loads += 1

    def _expect(self, reply: httpx.Response, name: str, statuses: set[int]) -> None:
        if reply.status_code not in statuses:
            told = f"{name}: {reply.request.url.path}: {reply.status_code}: {reply.text[:300]}"
            self.failures.append(told)

    def _ask(self, name: str) -> httpx.Response:
        body = {"model": name, "prompt": "Tell me of the sea:", "max_tokens": 8, "temperature": 0}
        return self._call("/v1/completions", body)

    def _call(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Make a call until it is answered; `extensions` of the answer tell how many it took."""
        calls = 0
        while True:
            calls += 1
            try:
                reply = httpx.post(f"{self._url}{path}", json=body, timeout=TIMEOUT)
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code not in (502, 503, 504):
                reply.extensions["calls"] = calls
                return reply
            self.stopping.wait(RETRY_SECONDS)
