"""Bodies of eight megabytes, each the worst of its kind for some part of a router."""

import json
from collections.abc import Callable
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SIZE = 8_000_000  # bytes, a little under the limit
ASK = b"What is a graft? "


def filled(head: bytes, unit: bytes, end: bytes) -> bytes:
    """Return a body that repeats a unit until it is as large as bodies are."""
    return head + unit * ((SIZE - len(head) - len(end)) // len(unit)) + end


def of_units(head: str, make: Callable[[int], str], count: int, end: str) -> bytes:
    """Return a body of units that differ."""
    return (head + ",".join(map(make, range(count))) + end).encode()


def _chat(model: str, **more: Any) -> str:
    """Return a chat up to where another field may follow."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return json.dumps(body | more)[:-1] + ","


def bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Return (path, body) by kind."""
    start = f'{{"model":"{model}","max_tokens":4,'.encode()
    says = start + b'"messages":[{"role":"user","content":"'
    turn = b'{"role":"user","content":"a"},'
    some = _chat(model)
    schema = ',"type":"object"}}}'
    return {
        "a million small objects": (CHAT, filled(start + b'"messages":[', b"{},", b"{}]}")),
        "deep in one another": (CHAT, start + b'"messages":' + b"[" * (SIZE // 2)),
        "one text": (CHAT, filled(says, ASK, b'"}]}')),
        "one text of escapes": (CHAT, filled(says, rb"\u00e9", b'"}]}')),
        "one text that may fit": (CHAT, says + ASK * 20_000 + b'"}]}'),
        "lone surrogates": (CHAT, filled(says, rb"\ud800", b'"}]}')),
        "a million token ids": (COMPLETION, filled(start + b'"prompt":[', b"1234567,", b"5]}")),
        "a million ids that are tokens": (
            COMPLETION,
            start + b'"prompt":[' + b"500," * 999_999 + b"5]}",
        ),
        "100,000 messages": (CHAT, start + b'"messages":[' + turn * 99_999 + turn[:-1] + b"]}"),
        "16,000 messages": (CHAT, start + b'"messages":[' + turn * 15_999 + turn[:-1] + b"]}"),
        "16,000 messages of Anthropic's": (
            MESSAGES,
            start + b'"messages":[' + turn * 15_999 + turn[:-1] + b"]}",
        ),
        "16,000 turns of a response": (
            RESPONSES,
            f'{{"model":"{model}","max_output_tokens":4,"input":['.encode()
            + turn * 15_999
            + turn[:-1]
            + b"]}",
        ),
        "500 tools": (
            CHAT,
            of_units(
                some + '"tools":[',
                lambda n: (
                    f'{{"type":"function","function":{{"name":"f{n}","parameters":{{'
                    f'"type":"object","properties":{{{_properties(n, 120)}}}}}}}}}'
                ),
                500,
                "]}",
            ),
        ),
        "a schema of 60,000 properties": (
            CHAT,
            of_units(
                some
                + '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{'
                '"properties":{',
                lambda n: f'"p{n}":{{"type":"integer"}}',
                60_000,
                "}" + schema + "}",
            ),
        ),
        "logit_bias of 500,000 tokens": (
            CHAT,
            of_units(some + '"logit_bias":{', lambda n: f'"{n}":1', 500_000, "}}"),
        ),
        "logit_bias of 60,000 wrong values": (
            CHAT,
            of_units(some + '"logit_bias":{', lambda n: f'"{n}":"a"', 60_000, "}}"),
        ),
        "120,000 unknown keys": (
            CHAT,
            of_units(some, lambda n: f'"k{n}":1', 120_000, "}"),
        ),
        "a list of wrong items": (CHAT, filled(start + b'"messages":[', b"1,", b"1]}")),
        "a number of 8 million digits": (CHAT, filled(some.encode() + b'"seed":', b"9", b"}")),
        "120,000 stop strings": (
            CHAT,
            of_units(some + '"stop":[', lambda n: f'"{n}"', 120_000, "]}"),
        ),
        "detokenize a million": (
            "/detokenize",
            filled(b'{"tokens":[', b"1234,", b"5]}")[:5_000_000].rsplit(b",", 1)[0] + b"]}",
        ),
        "tokenize one text": ("/tokenize", filled(b'{"prompt":"', ASK, b'"}')),
        "tokenize what may fit": ("/tokenize", b'{"prompt":"' + ASK * 20_000 + b'"}'),
    }


def _properties(number: int, count: int) -> str:
    return ",".join(f'"p{number}_{n}":{{"type":"string"}}' for n in range(count))
