"""Which adapters there are, where they may come from, how many, and how they are held."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.adapters.sources.allow_list import AllowList
from deploy.config_values import ByteCount
from deploy.keys.base import Keys


class AdapterKeys(Keys):
    """Keys that `--help` shows under Adapters."""

    adapter: Annotated[
        tuple[str, ...], Field(description="Adapter to load at start, as NAME=DIR; repeatable.")
    ] = ()
    adapter_dir: Annotated[
        tuple[str, ...],
        Field(description="Directory whose sub-directories are adapters by name; repeatable."),
    ] = ()
    adapter_root: Annotated[
        tuple[str, ...],
        Field(description="Only where load_lora_adapter may read; repeatable; default: anywhere."),
    ] = ()
    adapter_sources: Annotated[
        tuple[str, ...],
        Field(
            description="Prefix of what load_lora_adapter may fetch (hf://org, s3://bucket/dir, "
            "https://host/dir); repeatable; default: nothing."
        ),
    ] = ()
    adapter_state: Annotated[
        Path | None,
        Field(
            description="File that keeps what calls do to adapters, and a drain, beyond the end of "
            "the server; default: kept while it runs."
        ),
    ] = None
    adapter_staging: Annotated[
        Path | None,
        Field(
            description="Folder of the pool for adapters that are uploaded or fetched; default: "
            "beside its state."
        ),
    ] = None
    max_upload: Annotated[
        ByteCount, Field(description="Largest adapter that is uploaded or fetched, in bytes.")
    ] = 2**32
    max_loras: Annotated[int, Field(ge=1, description="Adapter slots on each rank.")] = 8
    max_lora_rank: Annotated[
        int, Field(ge=1, le=1024, description="Largest lora_rank that is accepted.")
    ] = 64
    lora_dtype: Annotated[
        Literal["auto", "int8"],
        Field(
            description="Type of A and B of linears in slots: that of dtype, or, on CPUs, int8 "
            "with a scale for each lora_rank, which takes half of the memory of bfloat16."
        ),
    ] = "auto"

    @model_validator(mode="after")
    def _check_adapters(self) -> "AdapterKeys":
        self.adapters()
        AllowList(self.adapter_sources)
        return self

    def adapters(self) -> dict[str, str]:
        """Return the adapters to load at start: directory by name.

        Raises:
            ValueError: if an entry is not NAME=DIR or a name comes twice.
        """
        directories: dict[str, str] = {}
        for entry in self.adapter:
            name, separator, directory = entry.partition("=")
            if not (name and separator and directory):
                raise ValueError(f"adapter {entry!r} is not of the form NAME=DIR")
            if name in directories:
                raise ValueError(f"adapter {name!r} is given twice")
            directories[name] = directory
        return directories
