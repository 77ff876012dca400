"""Hostile calls of every route, drawn from a seed: the same seed makes the same calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from urllib.parse import quote

from tests.fuzz.bodies import ADAPTERS, CHAT, COMPLETION, MAKERS, MESSAGES, RESPONSES
from tests.fuzz.values import Bodies


@dataclass(frozen=True)
class Hostile:
    """One call."""

    kind: str
    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _no_json(random: Random, model: str) -> Hostile:
    """Return a call whose body is none, or whose address or headers are strange."""
    name = quote(
        random.choice(["x", "a/b", "..", "%00", "ü", "x" * 3_000, "a?b#c", "\x00", "🙂"]), safe=""
    )
    garbage = random.randbytes(random.choice([0, 1, 8, 9, 100, 5_000]))
    length = (2**63 - 1).to_bytes(8, "little") + b"{}"
    query = random.choice(
        [
            "limit=0",
            "limit=1e9",
            f"limit={10**30}",
            "after=%ff%fe",
            "limit=-1",
            "after=" + "z" * 2_000,
        ]
    )
    stream = random.choice(
        [
            "stream=maybe",
            "stream=true&starting_after=-1",
            "starting_after=5",
            "stream=1&starting_after=x",
        ]
    )
    calls = [
        ("POST", CHAT, garbage, {}),
        ("POST", MESSAGES, b"[" * 100_000, {}),
        ("POST", RESPONSES, b"{" * 100_000, {}),
        ("POST", COMPLETION, b'{"model": "' + model.encode() + b'", "prompt": "a"' * 2, {}),
        ("POST", "/tokenize", b"null", {}),
        ("POST", CHAT, b"\xef\xbb\xbf{}", {}),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain"}),
        ("POST", CHAT, b" " * 9_000_000, {}),
        (
            "PUT",
            ADAPTERS + name,
            garbage,
            {"X-Adapter-Config": random.choice(["{", "{}", "[]", "x" * 6_000])},
        ),
        ("PUT", ADAPTERS + "y", length, {}),
        ("PUT", ADAPTERS + "y?sha256=x", b"", {}),
        ("PUT", ADAPTERS + "y?nope=1", b"", {}),
        ("GET", ADAPTERS + name, b"", {}),
        ("GET", "/v1/models/" + name, b"", {}),
        ("GET", f"/v1/models?{query}", b"", {}),
        ("GET", f"/v1/adapters?{query}", b"", {}),
        ("GET", f"/v1/streams/{name}", b"", {"Last-Event-ID": "x:1.2"}),
        ("GET", f"/v1/responses/{name}?{stream}", b"", {}),
        ("DELETE", f"/v1/responses/{name}", b"", {}),
        ("POST", f"/v1/responses/resp_{name}/cancel", b"", {}),
        ("DELETE", f"{ADAPTERS}{name}/pin", b"", {}),
        ("POST", "/reset_prefix_cache?reset_running_requests=%ff", b"", {}),
        ("PATCH", CHAT, b"{}", {}),
        ("GET", "/" + name, b"", {}),
        ("POST", CHAT, b"{}", {"X-Request-Id": "a" * 3_000}),
        ("POST", CHAT, b"{}", {"Authorization": "Bearer " + "k" * 3_000}),
    ]
    method, path, content, headers = random.choice(calls)
    return Hostile("no JSON", method, path, content, headers)


def hostile_calls(seed: int, model: str) -> Iterator[Hostile]:
    """Yield calls without an end."""
    random = Random(seed)
    names, weights = [*MAKERS], [weight for _, weight in MAKERS.values()]
    while True:
        if random.random() < 0.1:
            yield _no_json(random, model)
            continue
        (name,) = random.choices(names, weights)
        bodies = Bodies()
        path, body = MAKERS[name][0](random, bodies, model)
        streams = {"stream": True} if isinstance(body, dict) and random.random() < 0.15 else {}
        content = bodies.written({**body, **streams} if isinstance(body, dict) else body)
        yield Hostile(name, "POST", path, content, {"Content-Type": "application/json"})
