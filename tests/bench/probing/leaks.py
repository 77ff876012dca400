"""What an answer gives away: texts of another tenant, cached tokens, a difference to its twin."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import httpx

from tests.bench.probing.calls import Call, Probe
from tests.bench.probing.scene import SPY_KEY

# What differs between any two answers: when, which one, how long.
UNLIKE = ("date", "x-request-id", "request-id", "content-length")
_IDS = re.compile(rb'"(id|request_id|created|created_at)":("[^"]*"|[0-9.]+)')


@dataclass
class Found:
    """What the spy has found out so far."""

    num_calls: int = 0
    num_twins: int = 0
    num_prompts: int = 0
    by_status: dict[int, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)


class Spy:
    """Sends probes and looks at every byte of the answers, heads too."""

    def __init__(
        self,
        url: str,
        secrets: list[str],
        found: Found,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {SPY_KEY}"}
        self._client = httpx.Client(
            base_url=url, headers=headers, timeout=120.0, transport=transport
        )
        self._secrets = secrets
        self._found = found

    def probe(self, probe: Probe) -> None:
        """Send a call and its twin, and note what they give away."""
        reply = self._send(probe.call)
        if probe.call.asks_prompt:
            self._look_for_cached(probe.call, reply)
        if probe.twin is None:
            return
        self._found.num_twins += 1
        theirs, nobodys = self._plain(reply), self._plain(self._send(probe.twin))
        mine, other = probe.differs
        theirs = theirs.replace(mine.encode(), other.encode())
        # Of a path an answer may also name the last part alone.
        if theirs.replace(Path(mine).name.encode(), Path(other).name.encode()) != nobodys:
            what = f"{probe.call.method} {probe.call.path} {probe.call.body}"
            self._found.leaks.append(
                f"told apart: {what[:300]}\n  {theirs[:600]!r}\n  {nobodys[:600]!r}"
            )

    def _send(self, call: Call) -> httpx.Response:
        request = self._client.build_request(
            call.method, call.path, json=call.body, headers=call.headers
        )
        reply = self._client.send(request, stream=True)
        if not (call.ends_at_once and reply.status_code == 200):
            reply.read()
        reply.close()
        found = self._found
        found.num_calls += 1
        found.by_status[reply.status_code] = found.by_status.get(reply.status_code, 0) + 1
        self._look_for_secrets(call, reply)
        return reply

    def _look_for_secrets(self, call: Call, reply: httpx.Response) -> None:
        """Look for what the spy has not said itself in this call."""
        said = unquote(json.dumps([call.path, call.body, call.headers])).lower()
        heads = "\n".join(f"{name}: {value}" for name, value in reply.headers.multi_items())
        body = reply.content.decode("utf-8", "replace") if reply.is_stream_consumed else ""
        answer = f"{heads}\n{body}".lower()
        self._found.leaks += [
            f"{secret!r} in the answer to {call.method} {call.path}: {answer[:300]!r}"
            for secret in self._secrets
            if secret in answer and secret not in said
        ]

    def _look_for_cached(self, call: Call, reply: httpx.Response) -> None:
        if reply.status_code != 200:
            self._found.leaks.append(f"no answer to a prompt: {reply.text[:300]}")
            return
        self._found.num_prompts += 1
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        if cached:
            salt = call.body.get("cache_salt")
            self._found.leaks.append(f"{cached} cached tokens with the salt {salt!r}")

    def _plain(self, reply: httpx.Response) -> bytes:
        heads = sorted(
            f"{name}: {value}"
            for name, value in reply.headers.multi_items()
            if name.lower() not in UNLIKE
        )
        body = _IDS.sub(rb'"\1":0', reply.content)
        return f"{reply.status_code}\n{heads}\n".encode() + body
