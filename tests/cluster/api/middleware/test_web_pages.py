"""cluster.api.middleware.web_pages: which hosts and origins a server without keys answers."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.api.middleware.web_pages import MAX_KNOWN, RefuseStrangers

NAMES = ("127.0.0.1", "llm.example")


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def status(
    host: str | None,
    origin: str | None = None,
    names: tuple[str, ...] | None = NAMES,
    origins: tuple[str, ...] = (),
    app: RefuseStrangers | None = None,
) -> tuple[int, str]:
    """Return the status and the body that a request with these headers is answered with."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [(b"accept", b"*/*")]
    headers += [(b"host", host.encode())] if host is not None else []
    headers += [(b"origin", origin.encode())] if origin is not None else []
    scope: dict[str, Any] = {"type": "http", "headers": headers}
    app = app or RefuseStrangers(ok, names, origins)
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent).decode()


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LOCALHOST", "localhost.:80"),
        *("[::1]:8000", "10.0.0.7", "llm.example", "LLM.example:8000", "ui.localhost"),
        None,
    ],
)
def test_addresses_and_names_of_the_server_are_answered(host: str | None) -> None:
    assert status(host) == (200, "")


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("", ":8000", "[::1", "user@evil.example", "llm.example.evil", "notlocalhost", "\u00ff"),
    ],
)
def test_other_names_may_be_a_web_pages_trick_and_are_refused(host: str) -> None:
    code, body = status(host)
    assert code == 403
    assert "Host:" in body and "--allowed-host" in body


@pytest.mark.parametrize(
    "origin",
    [
        *("http://127.0.0.1:8000", "http://localhost:3000", "https://LLM.example", "http://[::1]"),
        "https://ui.example",
    ],
)
def test_pages_of_the_server_of_this_machine_and_allowed_ones_may_ask(origin: str) -> None:
    host = "llm.example" if "LLM" in origin else "127.0.0.1:8000"
    assert status(host, origin, origins=("https://ui.example",)) == (200, "")


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "http://evil.example:8000", "null", "", "http://", "http://[::1"),
        *(
            "https://ui.example.evil.example",
            "http://ui.example",
            "file://",
            "chrome-extension://x",
        ),
    ],
)
def test_pages_of_strangers_may_not(origin: str) -> None:
    code, body = status("127.0.0.1:8000", origin, origins=("https://ui.example",))
    assert code == 403
    assert "Origin:" in body and "--allowed-origin" in body


def test_a_page_whose_name_was_made_to_point_here_is_refused_by_its_host() -> None:
    assert status("evil.example:8000", "http://evil.example:8000")[0] == 403


def test_where_any_name_will_do_pages_of_others_are_still_refused() -> None:
    assert status("llm.svc.cluster.local", None, names=None)[0] == 200
    assert status("llm.svc.cluster.local", "http://llm.svc.cluster.local", names=None)[0] == 200
    assert status("llm.svc.cluster.local", "https://evil.example", names=None)[0] == 403
    assert status("any", "https://evil.example", names=None, origins=("*",))[0] == 200


def test_headers_that_are_always_new_fill_no_memory() -> None:
    app = RefuseStrangers(ok, NAMES, ())
    for number in range(MAX_KNOWN + 100):
        status(f"{number}.example", app=app)
    assert app._fault_of.cache_info().currsize == MAX_KNOWN
