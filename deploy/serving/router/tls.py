"""Lets what Serve starts for HTTP, a router or its own proxy, answer hosts of the cluster alone.

Serve's options know certificates, but not that a client must have one.
"""

import ssl
from types import SimpleNamespace
from typing import Any

import uvicorn
from ray.serve._private import http_util

from worker.transport.tls import node_tls


def _config_class(context: ssl.SSLContext) -> type[uvicorn.Config]:
    class TlsConfig(uvicorn.Config):
        """A server's configuration with this context, whatever else it says."""

        def load(self) -> None:
            super().load()
            self.ssl = context

    return TlsConfig


def demand_certificates() -> None:
    """Let HTTP servers that Serve starts from now on answer hosts of the cluster alone.

    Nothing changes without certificates. Serve gives each server to uvicorn by this module's name.

    Raises:
        OSError: if this node's certificate cannot be read.
    """
    tls = node_tls()
    if tls is not None:
        module: Any = http_util
        module.uvicorn = SimpleNamespace(Server=uvicorn.Server, Config=_config_class(tls.server))
