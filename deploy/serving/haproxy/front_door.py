"""What an operator may say of the front door, on its way to the HAProxy of each node.

Serve's manager of HAProxy is an actor that nobody hands a configuration: it finds this in its
environment, as it finds Serve's own settings.
"""

import math
import os
from collections.abc import Mapping
from typing import Annotated

import msgspec

from deploy.config import ServeConfig
from deploy.config_values import networks_of

NAME = "TOPWORK_FRONT_DOOR"
_LONGEST = 86_400  # seconds; HAProxy takes no more than 2^31 milliseconds
# Of ServeConfig. Routers, too, go by the last.
KEYS = ("tls_cert", "tls_key", "max_connections_per_address", "trusted_proxy", "body_timeout")


class FrontDoor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where clients come in, and how long each of their steps may take, in seconds."""

    host: str | None = None  # the only address to listen on, if it is not to be Serve's
    tls_cert: str | None = None  # files; None: plain HTTP
    tls_key: str | None = None
    # Of one client's address; None: a quarter of all, 0: as many as there are in all.
    max_connections_per_address: int | None = None
    trusted_proxy: tuple[str, ...] = ()  # addresses and networks that this does not hold for
    head_timeout: int = 20  # until the head of a request has come
    # Until a body has come, or as much of it as a buffer holds.
    body_timeout: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    # But not less than that buffer of 64 KiB may take, at the 4 KiB/s asked of clients.
    slowest_buffer: int = 16
    idle_timeout: int = 120  # until a client goes on with a body, or takes more of an answer

    @classmethod
    def of_config(cls, config: ServeConfig, host: str | None = None) -> "FrontDoor":
        """Return what the keys of a configuration say."""
        cert, key = config.tls_cert, config.tls_key or config.tls_cert
        return cls(
            host=host,
            tls_cert=None if cert is None else str(cert.absolute()),
            tls_key=None if key is None else str(key.absolute()),
            max_connections_per_address=config.max_connections_per_address,
            trusted_proxy=config.trusted_proxy,
            body_timeout=config.body_timeout,
        )

    @property
    def short_body_timeout(self) -> int:
        """Return how long a body that fits into HAProxy's buffer may take."""
        return max(self.slowest_buffer, math.ceil(min(self.body_timeout, _LONGEST)))

    def environment(self) -> dict[str, str]:
        """Return what the environment of each node must have; nothing where all is as ever."""
        text = msgspec.json.encode(self).decode()
        return {} if self == FrontDoor() else {NAME: text}

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "FrontDoor":
        """Return what an environment says.

        Raises:
            ValueError: if somebody else has written it.
        """
        door = msgspec.json.decode(environment.get(NAME, "{}"), type=cls)
        return msgspec.structs.replace(door, trusted_proxy=networks_of(door.trusted_proxy))
