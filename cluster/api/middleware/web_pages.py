"""Keeps the web pages of strangers from a server without keys.

A browser sends what any page asks for, also to this machine: its `Origin` tells which page it was.
A page whose own name was made to point here (DNS rebinding) has that name as its origin and in
`Host`: so a name must be one that this server is known by.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.error_handlers import error_response
from cluster.errors import Forbidden

MAX_KNOWN = 1024  # pairs of headers whose verdict is remembered: anyone can send others
MAX_SHOWN = 100  # characters of a header in a message


class RefuseStrangers:
    """Middleware that answers 403 to requests from pages, and under names, that are not ours."""

    def __init__(
        self, app: ASGIApp, hosts: Sequence[str] | None, origins: Sequence[str] | None
    ) -> None:
        """Take note of what is allowed, in small letters.

        Args:
            app: what is asked if nothing is wrong.
            hosts: names of this server beside addresses and localhost; None: any name.
            origins: origins of pages that may ask beside its own; "*": all.
        """
        self._app = app
        self._hosts = None if hosts is None else frozenset(hosts)
        self._origins = frozenset(origins or ())
        # What clients send differs little, and a look at it takes several microseconds.
        self._fault_of = lru_cache(MAX_KNOWN)(self._fault)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or say what is wrong with it."""
        if scope["type"] == "http":
            host = origin = None
            for name, value in scope["headers"]:
                if name == b"host":
                    host = value
                elif name == b"origin":
                    origin = value
            fault = self._fault_of(host, origin)
            if fault is not None:
                await error_response(Forbidden(fault))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _fault(self, host: bytes | None, origin: bytes | None) -> str | None:
        """Return why a request with these headers is refused; None: it is not."""
        name = _name(f"//{host.decode('latin-1')}") if host is not None else None
        # Without it no browser asks.
        if host is not None and not self._is_ours(name):
            return (
                f"Host: {host.decode('latin-1')[:MAX_SHOWN]!r} is no name of this server; a web "
                "page may have made it up. Ask the server by its address, or let it be started "
                "with --allowed-host"
            )
        if origin is None or "*" in self._origins:
            return None
        text = origin.decode("latin-1").lower()
        page = _name(text)
        if text in self._origins or (page is not None and (page == name or _is_local(page))):
            return None
        return (
            f"Origin: web pages of {text[:MAX_SHOWN]!r} may not ask a server without keys, unless "
            "it is started with --allowed-origin"
        )

    def _is_ours(self, name: str | None) -> bool:
        if self._hosts is None:
            return True
        return name is not None and (name in self._hosts or _is_local(name) or _is_address(name))


def _name(url: str) -> str | None:
    """Return the name or address in `SCHEME://HOST:PORT`, in small letters; None: there is none."""
    try:
        name = urlsplit(url).hostname
    except ValueError:  # a bracket too much
        return None
    return name.rstrip(".") if name else None


def _is_local(name: str) -> bool:
    """Tell whether only this machine is called so, by browsers."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
