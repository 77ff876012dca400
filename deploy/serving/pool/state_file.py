"""Where the adapter pool keeps its state."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray
from ray.serve.context import _get_global_client

from deploy.config import ServeConfig


def server_id() -> str:
    """Return what this server has in common with no other: the id of Serve's controller.

    It is longer there than the pool's process and any replica: a controller restarts under the same
    id. It ends with `topwork serve` or `serve shutdown`.
    """
    client: Any = _get_global_client()
    server: str = client._controller._actor_id.hex()
    return server


def pool_state_file(config: ServeConfig, server: str) -> Path:
    """Return the file that is configured, or one on this node for this server and model."""
    if config.adapter_state is not None:
        return config.adapter_state
    model = blake2b(config.model.encode(), digest_size=4).hexdigest()
    node: Any = ray._private.worker._global_node
    folder = Path(node.get_session_dir_path(), "topwork")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"adapters-{server[:16]}-{model}.state"
