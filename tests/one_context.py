"""One TLS context for all clients of a process: reading the authorities takes 40 ms each time."""

import os
import ssl
from functools import cache
from typing import Any

from httpx._transports import default

_make = default.create_ssl_context


@cache
def _context(trust_env: bool, *_: str | None) -> ssl.SSLContext:
    return _make(trust_env=trust_env)


def create_ssl_context(
    verify: Any = True, cert: Any = None, trust_env: bool = True
) -> ssl.SSLContext:
    """Return what httpx would make, made once for what the environment says now."""
    if verify is not True or cert is not None:
        return _make(verify=verify, cert=cert, trust_env=trust_env)
    return _context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


def install() -> None:
    """Let every client of httpx in this process, and of packages over it, take that one."""
    default.create_ssl_context = create_ssl_context
