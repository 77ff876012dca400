"""Clients that break their connections at random moments, drawn from a seed."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

MODELS_IN_USE = 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
LONG = 128  # tokens: more bytes of a stream than are read before it is cut


@dataclass(frozen=True)
class Cut:
    """A call, and where it is broken off."""

    kind: str
    method: str
    path: str
    body: bytes
    num_sent: int  # bytes of head and body
    num_read: int  # bytes of the response, before the connection is cut
    waits: float  # seconds, behind what is sent
    resets: bool  # instead of closing

    @property
    def head(self) -> bytes:
        """What goes before the body."""
        told = (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Type: application/json\r\n"
        )
        return f"{told}Content-Length: {len(self.body)}\r\n\r\n".encode()


def calls(
    random: Random, models: list[str], weights: bytes, length: int
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (what it is, method, path, body) of calls that take long."""
    number = 0
    while True:
        number += 1
        model = random.choice(models[:MODELS_IN_USE])
        text = f"{number}: tell me all about {random.randrange(1000)}"
        common = {"model": model, "temperature": random.choice([0, 1]), "seed": number}
        endless = common | {"ignore_eos": True}
        turns = {"messages": [{"role": "user", "content": text}]}
        streams = {"stream": random.random() < 0.6}
        resumable = {"stream": True, "stream_options": {"resumable": True}}
        strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        choices = [
            ("chat", "/v1/chat/completions", endless | turns | streams | {"max_tokens": length}),
            (
                "choices",
                "/v1/chat/completions",
                endless | turns | streams | {"max_tokens": length, "n": 4},
            ),
            (
                "form",
                "/v1/chat/completions",
                common | turns | streams | {"max_tokens": length, "response_format": strict},
            ),
            (
                "tools",
                "/v1/chat/completions",
                common
                | turns
                | streams
                | {"max_tokens": length, "tools": [TOOL], "tool_choice": "required"},
            ),
            (
                "completion",
                "/v1/completions",
                endless | streams | {"prompt": [text, text + "!"], "max_tokens": length},
            ),
            (
                "resumable",
                "/v1/completions",
                endless | resumable | {"prompt": text, "max_tokens": length},
            ),
            (
                "response",
                "/v1/responses",
                endless | streams | {"input": text, "max_output_tokens": length},
            ),
            (
                "background",
                "/v1/responses",
                endless
                | streams
                | {"input": text, "max_output_tokens": length // 10, "background": True},
            ),
            ("messages", "/v1/messages", endless | turns | streams | {"max_tokens": length}),
            (
                "embeddings",
                "/v1/embeddings",
                {"model": model, "input": [f"{text} {i} " * 5 for i in range(20)]},
            ),
        ]
        kind, path, body = random.choice(choices)
        if random.random() < 0.06:
            yield "upload", "PUT", f"/v1/adapters/cut-{number}", weights
        else:
            yield kind, "POST", path, body


def cuts(seed: int, models: list[str], weights: bytes, length: int = LONG) -> Iterator[Cut]:
    """Yield cut calls without an end.

    Args:
        weights: of an adapter, in safetensors.
        length: of an answer, in tokens.
    """
    random = Random(seed)
    for kind, method, path, given in calls(random, models, weights, length):
        body = given if isinstance(given, bytes) else json.dumps(given).encode()
        whole = Cut(kind, method, path, body, 0, 0, 0.0, False)
        size = len(whole.head) + len(body)
        moment = random.choice(["sending", "sent", "before the first token", "reading", "reading"])
        yield Cut(
            kind,
            method,
            path,
            body,
            num_sent=random.randrange(size) if moment == "sending" else size,
            num_read=random.choice([1, 200, 2_000, 10_000]) if moment == "reading" else 0,
            waits=random.uniform(0, 0.3) if moment == "before the first token" else 0.0,
            resets=random.random() < 0.5,
        )


def carry_out(cut: Cut, port: int, patience: float) -> str:
    """Make a call and break it off; return what of the response came before."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        connection.sendall((cut.head + cut.body)[: cut.num_sent])
        received = b""
        if cut.waits:
            connection.settimeout(cut.waits)
            with suppress(TimeoutError):
                received = connection.recv(65536)
        connection.settimeout(patience)
        while len(received) < cut.num_read:
            part = connection.recv(4096)
            received += part
            if not part or (b"\r\n\r\n" in received and b"chunked" not in received.lower()):
                break  # it has ended, or is whole
        if cut.resets:  # what has not been read or sent is thrown away
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return received.decode(errors="replace")
