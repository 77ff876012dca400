"""The bodies of POST /v1/messages and count_tokens: types, ranges, and what is refused.

A call that is accepted is a chat in another spelling: `chat_body` says which.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from cluster.api.messages.blocks import system_turns, turns_of
from cluster.api.messages.thinking import Thinking, thinking_of
from cluster.api.messages.tools import chat_choice, chat_tools
from cluster.api.request_builder import MAX_STOP_LENGTH, MAX_STOPS
from cluster.api.schemas.requests import (
    MAX_LORA_ENTRIES,
    MAX_MESSAGES,
    SEED_MAX,
    SEED_MIN,
    Body,
    ChatBody,
    ConversationBody,
    LoraEntry,
    Message,
    RequestId,
    ResponseFormat,
)
from cluster.api.tools.tool_use import ToolUse, tool_use_of
from cluster.errors import InvalidRequest
from cluster.request import PRIORITY_MAX, PRIORITY_MIN

MAX_VALUES = 262_144  # of a body: see `read_body`
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class MessageParam(Body):
    """One turn of a conversation: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: JsonValue


class MessageMetadata(Body):
    """What is known of the caller's own user; it says nothing to the model."""

    user_id: Annotated[str | None, Field(max_length=1024)] = None


class OutputConfig(Body):
    """How the answer is formed."""

    format: JsonValue = None
    effort: str | None = None


class PromptBody(Body):
    """What both calls have: a conversation, and what it is to be read by."""

    # Parameters that Anthropic's API has, with the values beside null that ask for nothing.
    neutral_values = {
        "container": (),
        "context_management": ({}, {"edits": []}),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: JsonValue = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    thinking: JsonValue = None
    output_config: OutputConfig | None = None
    output_format: JsonValue = None  # as it was called before
    cache_control: JsonValue = None  # prefixes are always kept: see `cluster.api.messages.blocks`
    chat_template_kwargs: dict[str, Any] | None = None  # ours, as chats have it

    def check(self) -> None:
        """Check what the fields mean together.

        Raises:
            InvalidRequest: for the first that cannot be served, with the reason.
        """
        self.refuse_extras()
        if self.output_config is not None:
            self.output_config.refuse_extras("output_config.")
            if self.output_config.effort not in (None, "high"):
                raise _unsupported("output_config.effort", "is not supported but as 'high'")
        thinking_of(self.thinking)

    @property
    def thoughts(self) -> Thinking:
        """What the call says of thoughts."""
        return thinking_of(self.thinking)

    def tool_use(self) -> ToolUse:
        """Return which tools the model is told of, and which it may or must use.

        Raises:
            InvalidRequest: naming the parameter and the reason.
        """
        choice = chat_choice(self.tool_choice)
        return tool_use_of(
            chat_tools(self.tools), choice.get("tool_choice"), choice.get("parallel_tool_calls")
        )

    def conversation(self) -> ConversationBody:
        """Return the conversation as chats have it; a last turn of the assistant's goes on.

        Raises:
            InvalidRequest: naming the block and the reason.
        """
        turns = turns_of([(message.role, message.content) for message in self.messages])
        is_prefilled = bool(turns) and turns[-1].role == "assistant"
        if is_prefilled and turns[-1].calls:
            raise InvalidRequest(
                "messages: the last message calls tools, so their results must follow", "messages"
            )
        if is_prefilled and not turns[-1].content.strip():
            is_prefilled = False  # an answer that says nothing yet is one that begins
            del turns[-1]
        if not turns:
            raise InvalidRequest("messages: they say nothing", "messages")
        return ConversationBody(
            messages=[
                Message(
                    role=turn.role,
                    content=turn.content,
                    tool_calls=turn.calls or None,
                    tool_call_id=turn.call_id,
                    reasoning_content="\n".join(turn.thoughts) or None,
                )
                for turn in [*system_turns(self.system), *turns]
            ],
            continue_final_message=is_prefilled,
            chat_template_kwargs=self._variables(),
        )

    def _variables(self) -> dict[str, Any] | None:
        """Return what the template is told: whether to think, and what the body says."""
        wanted = self.thoughts.is_wanted
        if wanted is None:
            return self.chat_template_kwargs
        return {"enable_thinking": wanted} | (self.chat_template_kwargs or {})


class CountTokensBody(PromptBody):
    """POST /v1/messages/count_tokens."""


class MessageBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[
        list[StopSequence] | None, Field(max_length=MAX_STOPS, fail_fast=True)
    ] = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31)] = None
    metadata: MessageMetadata | None = None
    # Ours, as chats have them.
    lora: Annotated[list[LoraEntry] | None, Field(min_length=1, max_length=MAX_LORA_ENTRIES)] = None
    seed: Annotated[int | None, Field(ge=SEED_MIN, le=SEED_MAX)] = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    priority: Annotated[int | None, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = None
    request_id: RequestId | None = None

    def chat_body(self, *, has_thoughts: bool) -> ChatBody:
        """Return the chat that this call is, to a model that has thoughts or has none to bound.

        Raises:
            InvalidRequest: for what no chat can mean, with the reason.
        """
        if self.metadata is not None:
            self.metadata.refuse_extras("metadata.")
        thoughts = self.thoughts
        if thoughts.budget is not None and thoughts.budget >= self.max_tokens:
            param = "thinking.budget_tokens"
            raise InvalidRequest(f"{param}: must be less than max_tokens", param)
        talk = self.conversation()
        schema = self._schema()
        if schema is not None and talk.continue_final_message:
            raise InvalidRequest(
                f"{FORMAT}: an answer of a given form cannot go on with the last message; end "
                "with a message of the user's",
                FORMAT,
            )
        return ChatBody(
            model=self.model,
            messages=talk.messages,
            continue_final_message=talk.continue_final_message,
            chat_template_kwargs=talk.chat_template_kwargs,
            stream=self.stream,
            include_reasoning=thoughts.is_shown,
            thinking_token_budget=thoughts.budget if has_thoughts else None,
            tools=chat_tools(self.tools),
            **chat_choice(self.tool_choice),
            max_tokens=self.max_tokens,
            stop=[*self.stop_sequences] if self.stop_sequences else None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            response_format=None
            if schema is None
            else ResponseFormat(type="json_schema", json_schema={"schema": schema}),
            lora=self.lora,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            priority=self.priority,
            request_id=self.request_id,
        )

    def _schema(self) -> JsonValue:
        """Return the JSON schema that the answer is to follow, if any."""
        config = None if self.output_config is None else self.output_config.format
        wanted = [one for one in (config, self.output_format) if one is not None]
        if not wanted:
            return None
        if len(wanted) > 1:
            raise InvalidRequest(f"{FORMAT}: output_format says it already; use one", FORMAT)
        (form,) = wanted
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise InvalidRequest(f"{FORMAT}: must be an object of type json_schema", FORMAT)
        if not isinstance(form.get("schema"), dict):
            raise InvalidRequest(f"{FORMAT}.schema: must be an object", f"{FORMAT}.schema")
        return form["schema"]


FORMAT = "output_config.format"


def as_spelled(error: InvalidRequest) -> InvalidRequest:
    """Return an error of the chat that a call is, in the words of the call."""
    words = (
        ("response_format.json_schema.schema", f"{FORMAT}.schema"),
        ("response_format", FORMAT),
        (".function.parameters", ".input_schema"),
        (".function", ""),
    )
    for of_chat, ours in words:
        if error.param is not None and of_chat in error.param:
            message = error.message.replace(of_chat, ours, 1)
            return InvalidRequest(message, error.param.replace(of_chat, ours, 1), error.code)
    return error


def _unsupported(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {reason}", param, "unsupported_parameter")
