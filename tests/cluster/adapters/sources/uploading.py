"""The bytes of adapters, and how they are sent to a pool."""

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from cluster.adapters.peft.checks import CONFIG, WEIGHTS
from cluster.adapters.records import AdapterRecord, LoadOptions
from tests.cluster.adapters.tiny import tiny_adapter


def files_of(content: int) -> tuple[bytes, bytes]:
    """Return (config, weights) of one of many adapters of equal size."""
    adapter = tiny_adapter("q_proj", "v_proj", seed=content)
    return json.dumps(adapter.config).encode(), save(adapter.tensors)


def with_config_inside(content: int) -> bytes:
    """Return one file that holds both."""
    adapter = tiny_adapter("q_proj", "v_proj", seed=content)
    return save(adapter.tensors, metadata={"adapter_config": json.dumps(adapter.config)})


async def upload(
    actor: Any,
    name: str,
    config: bytes | None,
    weights: bytes,
    load_inplace: bool = True,
    pinned: bool = False,
    sha256: str | None = None,
    piece: int = 500,
) -> AdapterRecord:
    """Send an adapter in pieces."""
    upload_id = await actor.begin_upload(name, load_inplace, len(weights))
    try:
        for offset in range(0, len(weights), piece):
            await actor.upload_piece(upload_id, offset, weights[offset : offset + piece])
        options = LoadOptions(load_inplace, pinned, sha256)
        record: AdapterRecord = await actor.finish_upload(upload_id, name, config, options)
    except BaseException:
        await actor.abort_upload(upload_id)
        raise
    return record


def staged(folder: Path) -> set[str]:
    """Return the adapters in a staging folder, each whole, and whatever else is there."""
    names = names_in(folder)
    for name in names:
        assert {path.name for path in (folder / name).iterdir()} == {CONFIG, WEIGHTS}, name
    return names


def names_in(folder: Path) -> set[str]:
    """Return what is in a staging folder, also while it changes."""
    return {path.name for path in folder.iterdir()} - {".lock"}
