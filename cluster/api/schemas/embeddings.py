"""The body and the response of POST /v1/embeddings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, JsonValue

from cluster.api.embedding_format import EmbedDtype, Endianness
from cluster.api.schemas.requests import (
    MAX_LORA_ENTRIES,
    MAX_TEMPLATE,
    NEUTRAL_VALUES,
    Body,
    LoraEntry,
    Messages,
    RequestId,
    TruncationSide,
)
from cluster.request import PRIORITY_MAX, PRIORITY_MIN


class EmbeddingBody(Body):
    """POST /v1/embeddings: texts, lists of token ids, or a conversation."""

    neutral_values: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = NEUTRAL_VALUES | {
        "padding": ("do_not_pad",),  # vLLM's
    }

    model: Annotated[str, Field(min_length=1)]
    input: JsonValue = None
    messages: Messages | None = None  # vLLM's: one conversation in place of input
    add_generation_prompt: bool | None = None  # False unless given, as the next
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str | None, Field(min_length=1, max_length=MAX_TEMPLATE)] = None
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    # The last two are vLLM's: numbers without JSON, with what is said of them in a header, or not.
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None  # of what is not float: float32 unless given
    endianness: Endianness | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None  # None: as the model's configuration says
    use_activation: bool | None = None  # vLLM's word for it
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: TruncationSide | None = None  # what is cut off: the left unless given
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    request_id: RequestId | None = None


_VECTOR = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers [D], or base64 of them in the type and the order that were asked for."""

    object: str = "embedding"
    index: int
    embedding: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_VECTOR)]


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0  # vLLM's


class Embeddings(msgspec.Struct, kw_only=True):
    """The response of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
