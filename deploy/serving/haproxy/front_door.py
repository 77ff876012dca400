"""What an operator may say of the front door, on its way to the HAProxy of each node.

Serve's manager of HAProxy is an actor that nobody hands a configuration: it finds this in its
environment, as it finds Serve's own settings.
"""

import os
from collections.abc import Mapping

import msgspec

NAME = "TOPWORK_FRONT_DOOR"


class FrontDoor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where clients come in, and how long each of their steps may take, in seconds."""

    host: str | None = None  # the only address to listen on, if it is not to be Serve's
    head_timeout: int = 20  # until the head of a request has come
    idle_timeout: int = 120  # until a client goes on with a body, or takes more of an answer

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
        return msgspec.json.decode(environment.get(NAME, "{}"), type=cls)
