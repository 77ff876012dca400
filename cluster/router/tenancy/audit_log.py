"""The audit log: who has changed what is served, or has tried to; a line of JSON for each call.

Owns what a line holds. Keys are not in it, only what the file of keys calls them. Lines go through
a logger of their own, whatever the level of the others is, so that whoever runs the server can send
them elsewhere.
"""

import logging
from datetime import UTC, datetime
from typing import Literal

import msgspec

from cluster.router.json_line import json_line
from cluster.router.tenancy.principal import Principal

logger = logging.getLogger("topwork.audit")
logger.setLevel(logging.INFO)

MAX_TEXT = 1024  # characters of what a caller has sent

Action = Literal[
    "load",
    "unload",
    "upload",
    "load_tensors",
    "rollback",
    "split",
    "pin",
    "unpin",
    "drain",
    "undrain",
    "reset_prefix_cache",
    "kv_events",
]
Value = str | int | bool | None


class AuditEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One administrative call; fields that say nothing are left out."""

    time: str = ""  # of its end, UTC
    action: Action
    router: str
    request_id: str
    tenant: str | None = None  # None: nobody who is known
    key: str | None = None  # the name of the key
    client: str | None = None  # the address that the connection came from
    forwarded_for: str | None = None  # X-Forwarded-For: what proxies say, the last of them last
    adapter: str | None = None
    details: dict[str, Value] = {}
    status: int = 0  # HTTP
    error: str | None = None

    def of(self, principal: Principal) -> None:
        """Note who calls."""
        self.tenant, self.key = principal.tenant, principal.key_name

    def about(self, adapter: str | None = None, **details: Value) -> None:
        """Note what the call is about; what a caller has sent is cut."""
        if adapter is not None:
            self.adapter = adapter[:MAX_TEXT]
        self.details |= {
            name: value[:MAX_TEXT] if isinstance(value, str) else value
            for name, value in details.items()
            if value is not None
        }

    def ended(self, status: int, error: str | None = None) -> None:
        """Write the line of a call that was answered so."""
        self.status = status
        self.error = None if error is None else error[:MAX_TEXT]
        self.time = datetime.now(UTC).isoformat(timespec="milliseconds")
        logger.info("%s", json_line(msgspec.to_builtins(self)))
