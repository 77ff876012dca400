"""The bodies of inference and of the tokenizer, as pydantic models.

Owns types and single-value ranges. What fields mean together is `validation`'s.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from cluster.router.bodies import Body

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1
MAX_LORA_ENTRIES = 8  # of one sum
MAX_LORA_WEIGHT = 100


class LoraEntry(Body):
    """One adapter of a weighted sum."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(ge=-MAX_LORA_WEIGHT, le=MAX_LORA_WEIGHT)] = 1.0


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """What chat and text completions have in common; None is the default of each."""

    model: Annotated[str, Field(min_length=1)]
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=1000)] = None
    seed: Annotated[int | None, Field(ge=SEED_MIN, le=SEED_MAX)] = None
    stop: JsonValue = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=256)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
        | None
    ) = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    return_token_ids: bool | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: JsonValue = None
    name: str | None = None


class ConversationBody(Body):
    """The part of a body that a chat template renders."""

    messages: Annotated[list[Message], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, ConversationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: JsonValue
    best_of: Annotated[int | None, Field(ge=1)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
