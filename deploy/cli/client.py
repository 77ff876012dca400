"""A server over HTTP, as the commands ask it: JSON, pages of lists, streamed answers."""

import json
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from deploy.config_errors import one_line, shown

CONNECT_TIMEOUT = 5.0  # seconds
ANSWER_TIMEOUT = 30.0  # seconds, of what is answered at once
PAGE = 1000  # entries of a list in one call
MAX_PAGES = 1000


class CallError(Exception):
    """A call that failed; the message says why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # None: there was no answer


class Client:
    """Calls of one server with one key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Take an address; `/v1` at its end, as OpenAI's clients want it, may be there.

        Raises:
            CallError: if the key cannot be sent.
        """
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise CallError("the API key has characters that no header can have")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Accept": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key.strip()}"
        self._http = httpx.Client(
            headers=headers, timeout=httpx.Timeout(ANSWER_TIMEOUT, connect=CONNECT_TIMEOUT)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """Return the JSON of a route.

        Raises:
            CallError: if the server is not there, or refuses.
        """
        return _json_of(_checked(self.reply(path)))

    def post(self, path: str, body: object) -> Any:
        """Return the JSON that a call answers, however long it takes; raises as `get`."""
        return _json_of(_checked(self._send("POST", path, body, timeout=None)))

    def delete(self, path: str) -> Any:
        """Return the JSON that a call answers that takes something back; raises as `get`."""
        return _json_of(_checked(self._send("DELETE", path, None, timeout=None)))

    def reply(self, path: str) -> httpx.Response:
        """Return the answer of a route, whatever its status; raises as `get` if there is none."""
        return self._send("GET", path, None, timeout=ANSWER_TIMEOUT)

    def adapters(self) -> list[dict[str, Any]]:
        """Return all entries of the catalogue that the key may see; raises as `get`."""
        entries: list[dict[str, Any]] = []
        after = ""
        for _ in range(MAX_PAGES):
            page = self.get(f"/v1/adapters?limit={PAGE}&after={quote(after, safe='')}")
            try:
                entries += page["data"]
                has_more, after = page["has_more"], str(page["last_id"])
            except (KeyError, TypeError):
                raise CallError(f"{self.url}: no list of adapters: {shown(page)}") from None
            if not has_more:
                return entries
        raise CallError(f"{self.url}: the list of adapters has no end")

    def chat(self, body: dict[str, Any]) -> Generator[str, None, None]:
        """Stream the text of an answer; closing it ends the call.

        Raises:
            CallError: as `get`, also in the middle.
        """
        try:
            with self._http.stream(
                "POST",
                f"{self.url}/v1/chat/completions",
                json={**body, "stream": True},
                timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            ) as reply:
                if not reply.is_success:
                    reply.read()
                _checked(reply)
                yield from _texts(reply.iter_lines())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreached(error) from error

    def _send(self, method: str, path: str, body: object, timeout: float | None) -> httpx.Response:
        try:
            return self._http.request(
                method,
                f"{self.url}{path}",
                json=body,
                timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreached(error) from error

    def _unreached(self, error: Exception) -> CallError:
        said = one_line(error) or type(error).__name__
        return CallError(f"{self.url}: {said}; is a server running there? --url names another one")


def _checked(reply: httpx.Response) -> httpx.Response:
    """Return a good answer; raise CallError with what another one says."""
    if reply.is_success:
        return reply
    try:
        said = reply.json()["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = reply.reason_phrase or "no reason given"
    hint = "; --api-key or TOPWORK_API_KEY gives a key" if reply.status_code == 401 else ""
    raise CallError(f"{one_line(said)}{hint}", reply.status_code)


def _json_of(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except (ValueError, RecursionError):
        raise CallError(
            f"{reply.url}: no JSON, but {shown(reply.text)}: is that a Topwork server?"
        ) from None


def _texts(lines: Iterator[str]) -> Iterator[str]:
    """Return the text of each event of a streamed answer."""
    for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if not data:
            continue
        try:
            event = json.loads(data)
            if "error" in event:
                raise CallError(one_line(event["error"]["message"]))
            texts = [choice["delta"].get("content") for choice in event["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CallError(f"an event that is none of a chat: {shown(data)}") from None
        yield from (text for text in texts if isinstance(text, str) and text)
    raise CallError("the answer broke off")
