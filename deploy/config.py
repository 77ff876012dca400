"""The one schema of what an operator may set: every key is a flag of `topwork serve` as well.

The same schema as JSON, for editors and for charts, is in config.schema.json.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from deploy.config_errors import ConfigError, explain, read_mapping
from deploy.config_values import is_loopback
from deploy.keys.adapters import AdapterKeys
from deploy.keys.base import Keys
from deploy.keys.cluster import ClusterKeys
from deploy.keys.http import HttpKeys
from deploy.keys.kv_events import KvEventKeys
from deploy.keys.logs import LogKeys
from deploy.keys.memory import MemoryKeys
from deploy.keys.model import ModelKeys
from deploy.keys.requests import RequestKeys
from deploy.keys.scheduling import SchedulingKeys
from deploy.keys.security import SecurityKeys

__all__ = ["GROUPS", "ConfigError", "ServeConfig", "group_of", "json_schema", "load_config"]

# In the order in which a person looks for them.
GROUPS: dict[str, type[Keys]] = {
    "Model": ModelKeys,
    "Adapters": AdapterKeys,
    "Memory": MemoryKeys,
    "Scheduling": SchedulingKeys,
    "Requests": RequestKeys,
    "HTTP": HttpKeys,
    "Security": SecurityKeys,
    "Cluster": ClusterKeys,
    "Logs, metrics, traces and recording": LogKeys,
    "KV events": KvEventKeys,
}


# Keys of the last base come first.
class ServeConfig(
    KvEventKeys,
    LogKeys,
    ClusterKeys,
    SecurityKeys,
    HttpKeys,
    RequestKeys,
    SchedulingKeys,
    MemoryKeys,
    AdapterKeys,
    ModelKeys,
):
    """Every option of `topwork serve`."""

    @model_validator(mode="after")
    def _check(self) -> "ServeConfig":
        if not (self.anonymous or self.has_keys or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached from other machines: give api_key_file, "
                "bind 127.0.0.1, or set anonymous if something else decides who may ask"
            )
        for name in ("tls_cert", "max_connections_per_address", "trusted_proxy"):
            if self.ray_address is not None and getattr(self, name) not in (None, ()):
                raise ValueError(
                    f"{name}: HAProxy on the nodes of a cluster is told of it before `ray start`: "
                    f"`topwork environment --{name.replace('_', '-')}`"
                )
        if self.lora_dtype == "int8" and self.has_exact_sums and self.tp > 1:
            raise ValueError(
                "lora_dtype: in int8 each rank scales its own part of B, so answers would depend "
                "on tp, which deterministic with quantization int8 promises they do not: leave out "
                "lora_dtype or deterministic, or set tp to 1"
            )
        return self

    @property
    def local_url(self) -> str:
        """Where this machine reaches the server."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        host = f"[{host}]" if ":" in host else host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{self.port}"


def group_of(key: str) -> str:
    """Return the title of the group of a key of ServeConfig."""
    return next(title for title, keys in GROUPS.items() if key in keys.model_fields)


def load_config(file: Path | None, flags: dict[str, Any]) -> ServeConfig:
    """Return the configuration of a YAML file with the given flags on top.

    Raises:
        ConfigError: naming every key that is unknown or has a wrong value.
    """
    values = {**({} if file is None else read_mapping(file)), **flags}
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, ServeConfig.model_fields)) from error


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON Schema, of what may be written and not of what it becomes."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ServeConfig.model_json_schema(),
    }
