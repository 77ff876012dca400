"""What memory is for."""

from typing import Annotated

from pydantic import Field

from deploy.config_values import ByteCount, ByteCountOrZero
from deploy.keys.base import Keys


class MemoryKeys(Keys):
    """Keys that `--help` shows under Memory."""

    kv_cache_memory: Annotated[
        ByteCount, Field(description="KV cache of each rank, in bytes (512MiB, 2GiB).")
    ] = 2**29
    kv_host_memory: Annotated[
        ByteCountOrZero,
        Field(description="Host memory of each rank for KV that its device evicts, in bytes."),
    ] = 0
    page_size: Annotated[int, Field(ge=1, le=1024, description="Tokens in one KV page.")] = 64
    prefix_cache: Annotated[
        bool, Field(description="Keep and share the KV of earlier prompts of the same adapter.")
    ] = True
    adapter_memory: Annotated[
        ByteCount, Field(description="Memory of each rank for all adapters in slots, in bytes.")
    ] = 2**30
    host_adapter_memory: Annotated[
        ByteCount, Field(description="Host memory of the adapter pool, in bytes.")
    ] = 2**30
