"""Who hears what the prefix cache holds."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from deploy.config_values import is_loopback
from deploy.keys.base import Keys


class KvEventKeys(Keys):
    """Keys that `--help` shows under KV events."""

    kv_events_endpoint: Annotated[
        str | None,
        Field(description="Where replica 0 publishes KV events over ZeroMQ: tcp://127.0.0.1:5557."),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None, Field(description="Where readers ask replica 0 for KV events that they missed.")
    ] = None
    kv_events_topic: Annotated[str, Field(description="ZeroMQ topic of KV events.")] = ""
    kv_events_public: Annotated[
        bool,
        Field(description="Publish beyond this machine: whoever connects reads the prompts."),
    ] = False

    @model_validator(mode="after")
    def _check_kv_events(self) -> "KvEventKeys":
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint: str | None = getattr(self, name)
            if endpoint is None:
                continue
            match = re.fullmatch(r"tcp://(.+):(\d{1,5})", endpoint)
            if match is None:
                raise ValueError(f"{name} {endpoint!r} is not of the form tcp://HOST:PORT")
            if not (self.kv_events_public or is_loopback(match[1].strip("[]"))):
                raise ValueError(
                    f"{name} {endpoint} can be reached from other machines, and there is no key "
                    "on it: set kv_events_public, or use 127.0.0.1"
                )
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")
        return self
