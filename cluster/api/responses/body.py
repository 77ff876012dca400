"""The body of POST /v1/responses: types, ranges, and what of OpenAI's API is refused for now."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from cluster.api.prompts.bounds import values_in
from cluster.api.responses.text import text_settings
from cluster.api.schemas.requests import NEUTRAL_VALUES, GenerationBody
from cluster.api.tools.tool_use import ToolUse, tool_use_of
from cluster.errors import InvalidRequest

MAX_VALUES = 262_144  # of a body: see `read_body`
LOGPROBS = "message.output_text.logprobs"
# What `include` may name beside it: more of what an answer of this server never has.
WITHOUT_EFFECT = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
# Of the other ways to ask for text; None where nothing here means the same.
FOREIGN: dict[str, str | None] = {
    "max_tokens": "max_output_tokens",
    "n": None,
    "stop": None,
    "include_stop_str_in_output": None,
    "return_token_ids": None,
}

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseBody(GenerationBody):
    """POST /v1/responses; what it has in common with the other calls for text is theirs."""

    neutral_values = NEUTRAL_VALUES | {
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),  # a template that OpenAI keeps
    }

    input: JsonValue
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Annotated[list[str] | None, Field(max_length=16, fail_fast=True)] = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=16)] = None
    user: Annotated[str | None, Field(max_length=1024)] = None
    parallel_tool_calls: bool | None = None
    text: JsonValue = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    reasoning: JsonValue = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's, as the next: as chats have them
    include_reasoning: bool | None = None

    @property
    def effort(self) -> str | None:
        """How hard the model is to think."""
        effort = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        return effort if isinstance(effort, str) else None

    @property
    def tool_use(self) -> ToolUse:
        """What the call says of tools; raises InvalidRequest for what cannot be served."""
        return tool_use_of(
            _wrapped(self.tools), _wrapped_choice(self.tool_choice), self.parallel_tool_calls
        )

    @property
    def text_format(self) -> JsonValue:
        """The form of the answer that `text` asks for, if any."""
        form = self.text.get("format") if isinstance(self.text, dict) else None
        return None if form == {"type": "text"} else form

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later."""
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are shown for each token; None for no log-probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        """Check what the fields mean together.

        Raises:
            InvalidRequest: for the first that cannot be served, with the reason.
        """
        self._check_foreign()
        if self.chat_template_kwargs:
            values_in(self.chat_template_kwargs, "chat_template_kwargs")
        for name in self.include or ():
            if name != LOGPROBS and name not in WITHOUT_EFFECT:
                raise InvalidRequest(f"include: {name[:100]!r} is not known", "include")
        if self.top_logprobs and self.num_logprobs is None:
            raise InvalidRequest(f"top_logprobs: needs include=[{LOGPROBS!r}]", "top_logprobs")
        if self.background and not self.is_stored:
            raise InvalidRequest("background can only be used when `store` is true", "background")
        text_settings(self.text)
        refuse_for_now(self)

    def _check_foreign(self) -> None:
        for name, instead in FOREIGN.items():
            if getattr(self, name) is None or (name == "n" and self.n == 1):
                continue
            hint = "" if instead is None else f"; use {instead}"
            raise _unsupported(name, f"is not a parameter of this call{hint}")
        if self.stream_options is not None and self.stream_options.resumable:
            raise _unsupported(
                "stream_options.resumable", "is not needed: GET /v1/responses/{id} reads it on"
            )


def refuse_for_now(body: ResponseBody) -> None:
    """Raise InvalidRequest for what OpenAI's API has and this server does not, yet."""
    reasoning = {} if body.reasoning is None else body.reasoning
    if not isinstance(reasoning, dict):
        raise InvalidRequest("reasoning: must be an object", "reasoning")
    _refuse_others("reasoning", reasoning, ("effort", "summary"))
    if not isinstance(reasoning.get("effort"), str | None):
        raise InvalidRequest("reasoning.effort: must be a string", "reasoning.effort")
    if reasoning.get("summary") not in (None, "auto"):
        raise _unsupported("reasoning.summary", "is not supported: thoughts are shown as they are")


def _wrapped(tools: JsonValue) -> JsonValue:
    """Return tools as chats have them: all but the type within `function`."""
    if not isinstance(tools, list):
        return tools
    wrapped: list[JsonValue] = []
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
            function = {name: one for name, one in tool.items() if name != "type"}
            wrapped.append({"type": "function", "function": function})
        else:
            wrapped.append(tool)
    return wrapped


def _wrapped_choice(choice: JsonValue) -> JsonValue:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            allowed: JsonValue = {"mode": mode, "tools": _wrapped(tools)}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _refuse_others(param: str, value: dict[str, JsonValue], known: tuple[str, ...]) -> None:
    for name, one in sorted(value.items()):
        if name not in known and one is not None:
            raise _unsupported(f"{param}.{name[:100]}", "is not supported")


def _unsupported(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {reason}", param, "unsupported_parameter")
