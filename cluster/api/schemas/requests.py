"""The bodies of inference and of the tokenizer, as pydantic models.

Owns types and single-value ranges, and what all bodies have in common: exact types, and the
parameters of other servers. One that would change the answer and is not supported is refused by
name; one that asks for nothing, as null does, is accepted. What fields mean together is
`request_builder`'s.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from cluster.api.schemas.extras import STRICT, ExtraParameters
from cluster.api.schemas.not_served import OTHERS_NEUTRAL, WHY_NOT
from cluster.errors import InvalidRequest
from cluster.request import PRIORITY_MAX, PRIORITY_MIN

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
MAX_LORA_ENTRIES = 8  # of one sum
MAX_LORA_WEIGHT = 100
MAX_BAD_WORDS = 256
MAX_NAMED_TOKENS = 128  # whose log-probabilities are asked for
MAX_DOCUMENTS = 1024
MAX_TEMPLATE = 128 * 1024  # characters
MAX_MESSAGES = 16384  # of one conversation
MAX_BIAS = 1024  # tokens whose logits are shifted
MAX_OTHERS = 1024  # keys of one body that are no fields

# Said of the call or of the caller, not of the answer.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "store",
        "user",
    }
)

# Parameters that other servers know, with the values beside null that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[JsonValue, ...]] = OTHERS_NEUTRAL | {
    "added_tokens_config": ({},),
    "audio": (),
    "best_of": (1,),  # of chats; completions have it
    "chat_template": (),  # of calls without a conversation
    "documents": ([],),  # likewise
    "early_stopping": (False,),
    "echo": (False,),  # of chats and completions; they have it
    "function_call": ("none", "auto"),
    "functions": ([],),
    "http_worker_ipc": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_id": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),  # of calls for text; they have it
    "reasoning_effort": (),
    "request_id": (),  # of calls for text; they have it
    "return_tokens_as_token_ids": (False,),
    "rid": (),  # likewise
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class Body(BaseModel):
    """A JSON object from outside: exact types, finite numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    neutral_values: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = NEUTRAL_VALUES

    def refuse_extras(self, where: str = "", extras: ExtraParameters = STRICT) -> None:
        """Check that all that is not a field asks for nothing, or may be ignored.

        Raises:
            InvalidRequest: naming the first parameter, by name, that is not supported.
        """
        if len(self.model_extra or {}) > MAX_OTHERS:
            raise InvalidRequest(f"{where or 'the body'}: more than {MAX_OTHERS} unknown keys")
        for name, value in sorted((self.model_extra or {}).items()):
            neutral = self.neutral_values.get(name)
            if value is None or name in HARMLESS or _is_neutral(value, neutral or ()):
                continue
            if extras.ignores(where + name):
                continue
            why = f": {WHY_NOT[name]}" if name in WHY_NOT else ""
            is_known = why or neutral is not None
            known = "is not supported" if is_known else "is not a known parameter"
            raise InvalidRequest(
                f"{where}{name[:100]} {known}{why}", where + name[:100], "unsupported_parameter"
            )


def _is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    # True == 1 in Python, and best_of=true is not best_of=1
    return any(value == other and type(value) is type(other) for other in neutral)


Temperature = Annotated[float | None, Field(ge=0, le=2)]
TopP = Annotated[float | None, Field(gt=0, le=1)]
TopK = Annotated[int | None, Field(ge=-1, le=2**31)]  # -1 and 0: all tokens
MinP = Annotated[float | None, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float | None, Field(gt=0, le=1000)]
TruncationSide = Literal["left", "right"]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


def _few(value: object) -> object:
    """Refuse too many before the first is looked at: of an object, each would be a finding."""
    if isinstance(value, dict) and len(value) > MAX_BIAS:
        raise PydanticCustomError("too_long", f"at most {MAX_BIAS} tokens, not {len(value)}")
    return value


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_few),
    Field(max_length=MAX_BIAS),
]


class LoraEntry(Body):
    """One adapter of a weighted sum."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(ge=-MAX_LORA_WEIGHT, le=MAX_LORA_WEIGHT)] = 1.0


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with each event, beside include_usage
    resumable: bool | None = None  # ours: it can be read on after its connection broke


class ResponseFormat(Body):
    """OpenAI's form of an answer."""

    type: str
    json_schema: JsonValue = None


class StructuredOutputs(Body):
    """vLLM's form of an answer; one of them."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[JsonValue, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(fail_fast=True)] = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class GenerationBody(Body):
    """What chat and text completions have in common; None is the default of each."""

    model: Annotated[str, Field(min_length=1)]
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: RepetitionPenalty = None
    seed: Annotated[int | None, Field(ge=SEED_MIN, le=SEED_MAX)] = None
    stop: JsonValue = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=256, fail_fast=True)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    logit_bias: LogitBias | None = None
    bad_words: Annotated[list[str] | None, Field(max_length=MAX_BAD_WORDS, fail_fast=True)] = None
    allowed_token_ids: Annotated[list[int] | None, Field(min_length=1, fail_fast=True)] = None
    thinking_token_budget: Annotated[int | None, Field(ge=-1, le=2**31)] = None  # -1: none
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonValue = None  # vLLM's, before it had structured_outputs
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, Field(fail_fast=True)] = None
    guided_grammar: str | None = None
    json_schema: str | None = None  # SGLang's
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    request_id: RequestId | None = None  # goes before the header X-Request-Id
    rid: RequestId | None = None  # SGLang's word for it

    @property
    def text_format(self) -> JsonValue:
        """The form of the answer as /v1/responses spells it; None: it says nothing of it."""
        return None


class TextBody(GenerationBody):
    """What those have in common that show tokens, and take a prompt as it is."""

    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1)] = None
    truncation_side: TruncationSide | None = None  # what is cut off: the left unless given
    return_tokens_as_token_ids: bool | None = None
    # vLLM's: whose log-probabilities come in place of the likeliest ones'.
    logprob_token_ids: Annotated[
        list[int] | None, Field(max_length=MAX_NAMED_TOKENS, fail_fast=True)
    ] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class Message(Body):
    """One turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]  # the template knows which there are
    content: JsonValue = None
    name: str | None = None
    tool_calls: JsonValue = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer word for it


# One mistake is enough: to find a million of them would halt every stream.
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
ChatTemplate = Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)]
Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS, fail_fast=True)]


class ConversationBody(Body):
    """The part of a body that a chat template renders."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: ChatTemplate | None = None
    documents: Documents | None = None


class KvTransferParams(Body):
    """vLLM's: what another stage of a call has made of it."""

    model_config = ConfigDict(extra="forbid")

    # In place of those that the conversation is made into.
    prompt_token_ids: Annotated[list[int] | None, Field(min_length=1, fail_fast=True)] = None


class ChatBody(TextBody, ConversationBody):
    """POST /v1/chat/completions."""

    kv_transfer_params: KvTransferParams | None = None
    echo: bool | None = None  # vLLM's: the answer begins with the assistant's turn that it goes on
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, Field(max_length=64)] = None
    include_reasoning: bool | None = None


class CompletionBody(TextBody):
    """POST /v1/completions."""

    prompt: JsonValue
    echo: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=0)] = None  # 0: with echo, the prompt only
    best_of: Annotated[int | None, Field(ge=1)] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: ChatTemplate | None = None
    documents: Documents | None = None
    tools: JsonValue = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    skip_special_tokens: bool | None = None  # SGLang's: False unless given
    tokens: Annotated[list[int], Field(fail_fast=True)]
