"""Short calls that begin after a blow: how long each one takes until it is answered."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import httpx

INTERVAL = 0.25  # seconds between two calls
COUNT = 40  # calls: ten seconds of them
PATIENCE = 30.0  # seconds that one call is tried again
BODY = {"model": "smollm2", "prompt": "new", "max_tokens": 1}


class NewCalls:
    """Calls on connections of their own, while the block runs and until the last is answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked: list[Future[float]] = []
        self._thread = threading.Thread(target=self._call_all)
        self.seconds: list[float] = []  # of each call, once the block has ended

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self.seconds = [one.result() for one in self._asked]

    def _call_all(self) -> None:
        client = httpx.Client(base_url=self._url, headers={"Connection": "close"}, timeout=PATIENCE)
        with client, ThreadPoolExecutor(COUNT) as threads:
            for _ in range(COUNT):
                self._asked.append(threads.submit(self._call, client))
                time.sleep(INTERVAL)

    def _call(self, client: httpx.Client) -> float:
        """Return the seconds until a call is answered; one that nobody takes is made again."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            try:
                reply = client.post("/v1/completions", json=BODY)
            except httpx.TransportError:
                time.sleep(0.02)
                continue
            assert reply.status_code == 200, f"a new call got {reply.status_code}: {reply.text}"
            return time.monotonic() - began
        raise AssertionError(f"a new call was refused for {PATIENCE:g} s")
