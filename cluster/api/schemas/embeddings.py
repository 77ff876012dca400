"""The body and the response of POST /v1/embeddings."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field, JsonValue

from cluster.api.schemas.requests import (
    MAX_LORA_ENTRIES,
    NEUTRAL_VALUES,
    Body,
    LoraEntry,
    RequestId,
)
from cluster.request import PRIORITY_MAX, PRIORITY_MIN


class EmbeddingBody(Body):
    """POST /v1/embeddings: texts or lists of token ids."""

    neutral_values: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = NEUTRAL_VALUES | {
        "embed_dtype": ("float32",),  # vLLM's
        "endianness": ("native", "little"),
        "messages": (),
    }

    model: Annotated[str, Field(min_length=1)]
    input: JsonValue
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # None: as the model's configuration says
    use_activation: bool | None = None  # vLLM's word for it
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    request_id: RequestId | None = None


_VECTOR = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64 of [D] float32 in little-endian order."""

    object: str = "embedding"
    index: int
    embedding: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_VECTOR)]


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """The response of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
