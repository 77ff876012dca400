"""The bodies that clients send, as pydantic models, and the list of what is not supported.

Owns types and single-value ranges. A parameter that would change the answer and is not supported
is refused by name; one that asks for nothing is accepted. What fields mean together is
`validation`'s.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from cluster.errors import InvalidRequest

SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[!-~]+$")]

# Said of the call or of the caller, not of the answer.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "store",
        "user",
    }
)

# Parameters that other servers know, with the values beside null that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[JsonValue, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),  # of chats; completions have it
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class Body(BaseModel):
    """A JSON object from outside: exact types, finite numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    def refuse_extras(self, where: str = "") -> None:
        """Check that all that is not a field asks for nothing.

        Raises:
            InvalidRequest: naming the first parameter, by name, that is not supported.
        """
        for name, value in sorted((self.model_extra or {}).items()):
            if name in HARMLESS or (name in NEUTRAL_VALUES and value is None):
                continue
            if _is_neutral(value, NEUTRAL_VALUES.get(name, ())):
                continue
            known = "is not supported" if name in NEUTRAL_VALUES else "is not a known parameter"
            raise InvalidRequest(
                f"{where}{name[:100]} {known}", where + name[:100], "unsupported_parameter"
            )


def _is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    # True == 1 in Python, and best_of=true is not best_of=1
    return any(value == other and type(value) is type(other) for other in neutral)


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """What chat and text completions have in common; None is the default of each."""

    model: Annotated[str, Field(min_length=1)]
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


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    load_inplace: bool = False
    pinned: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name
    force: bool = False


class RollbackBody(Body):
    """POST /v1/adapters/{name}/rollback; without a version, the one before."""

    version: Annotated[int | None, Field(ge=1)] = None


VersionNumber = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Percent = Annotated[int, Field(ge=0, le=100, strict=True)]


class SplitBody(RootModel[Annotated[dict[VersionNumber, Percent], Field(max_length=16)]]):
    """POST /v1/adapters/{name}/split: share in percent by version; together 100."""

    model_config = ConfigDict(frozen=True)
