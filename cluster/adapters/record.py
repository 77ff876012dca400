"""What the control plane says of an adapter; frozen messages without behaviour."""

import msgspec


class AdapterRecord(msgspec.Struct, frozen=True):
    """One name in the catalogue and the content that it points at."""

    name: str
    digest: str  # SHA-256 of tensors, scaling and targets, hex
    version: int  # 1, 2, ... counted per name, one more with each new content
    path: str
    lora_rank: int  # the largest of its modules
    num_bytes: int  # tensors as stored
    modules: tuple[str, ...]  # linear modules it touches
    pinned: bool
    tier: str  # "host" or "disk": where the pool would take it from


class UnloadResult(msgspec.Struct, frozen=True):
    """What unloading a name left: `last_name` if no other name points at the digest."""

    digest: str
    last_name: bool
