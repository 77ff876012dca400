"""What memory is for."""

from typing import Annotated

from pydantic import Field

from deploy.config_values import ByteCount, ByteCountOrAuto, ByteCountOrZero
from deploy.keys.base import Keys

CPU_KV_MEMORY = 2**29  # bytes of each rank, unless told otherwise


class MemoryKeys(Keys):
    """Keys that `--help` shows under Memory."""

    kv_cache_memory: Annotated[
        ByteCountOrAuto,
        Field(
            description="KV cache of each rank, in bytes (2GiB); default, also by auto: 512MiB on "
            "a CPU, on a GPU what gpu_memory_utilization leaves."
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of a GPU's memory that may be in use, if kv_cache_memory is auto.",
        ),
    ] = 0.9
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

    def kv_memory_bytes(self, device: str) -> int | None:
        """Return the bytes of each rank's KV cache; None: its GPU is asked what is left."""
        if self.kv_cache_memory is None and device == "cpu":
            return CPU_KV_MEMORY
        return self.kv_cache_memory
