"""What bodies have in common whose prompts are pooled; and those that classify, score and rerank.

With their responses.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, JsonValue

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


class PoolingBody(Body):
    """What bodies have in common whose prompts are pooled."""

    neutral_values: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = NEUTRAL_VALUES | {
        "max_tokens_per_doc": (0,),  # vLLM's, as the next two
        "max_tokens_per_query": (0,),
        "padding": ("do_not_pad",),
    }

    model: Annotated[str, Field(min_length=1)]
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    use_activation: bool | None = None  # False: numbers as the ranks send them
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: TruncationSide | None = None  # what is cut off: the left unless given
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    request_id: RequestId | None = None


class PromptBody(PoolingBody):
    """What those have in common whose prompts are texts, lists of token ids, or a conversation."""

    input: JsonValue = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None  # False unless given
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str | None, Field(min_length=1, max_length=MAX_TEMPLATE)] = None


class ClassifyBody(PromptBody):
    """POST /v1/classify."""


class ScoreBody(PoolingBody):
    """POST /v1/score: a text and others, or as many texts as others, by any of vLLM's names."""

    text_1: JsonValue = None
    text_2: JsonValue = None
    queries: JsonValue = None
    documents: JsonValue = None
    items: JsonValue = None
    data_1: JsonValue = None
    data_2: JsonValue = None


class RerankBody(PoolingBody):
    """POST /v1/rerank, as Cohere and Jina spell it."""

    query: str
    documents: JsonValue
    top_n: Annotated[int | None, Field(ge=0)] = None  # 0: all
    return_documents: bool | None = None  # Jina's; true unless given


class PoolingUsage(msgspec.Struct):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0  # vLLM's


class Classification(msgspec.Struct, kw_only=True):
    """The classes of one prompt."""

    index: int
    label: str  # of the largest number
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct, kw_only=True):
    """The response of /v1/classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """How well two texts go together."""

    index: int
    object: str = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """The response of /v1/score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    """A document as it was given."""

    text: str


class RankedResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document's place among those of the call, and its score."""

    index: int
    document: RankedDocument | None = None
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """The response of /v1/rerank: best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedResult]
