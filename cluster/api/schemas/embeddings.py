"""The body and the response of POST /v1/embeddings."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from cluster.api.embedding_format import EmbedDtype, Endianness
from cluster.api.schemas.pooling import PoolingUsage, PromptBody


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings."""

    dimensions: Annotated[int | None, Field(ge=1)] = None
    # The last two are vLLM's: numbers without JSON, with what is said of them in a header, or not.
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None  # of what is not float: float32 unless given
    endianness: Endianness | None = None
    # As `use_activation`, vLLM's word for it; None: as the model's configuration says.
    normalize: bool | None = None


_VECTOR = {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]}


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers [D], or base64 of them in the type and the order that were asked for."""

    object: str = "embedding"
    index: int
    embedding: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_VECTOR)]


class Embeddings(msgspec.Struct, kw_only=True):
    """The response of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
