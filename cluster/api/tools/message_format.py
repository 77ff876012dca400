"""How the answer to a conversation is taken apart: its thoughts, its content, its calls.

Owns what the chat template must know for it, the model's or the request's own: what it would ignore
is refused.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from cluster.api.tools.tool_use import ToolUse
from cluster.errors import InvalidRequest
from cluster.router.parser.families import (
    BY_SCHEMA,
    DEFAULT_TOOL_CALLS,
    MessageFormat,
    opens_thought,
    reasoning_parser,
    tool_call_parser,
)
from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.router import Router

DEFAULT_EFFORT = "medium"  # OpenAI's: it asks for nothing


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """What a chat template lets a model know, and how answers to it are written."""

    name: str  # for errors
    source: str
    renders_tools: bool
    tool_calls: str  # how calls are written; "": that is not known
    reasoning: str  # the parser of thoughts; "": there are none
    begins_in_thought: bool  # answers do, whatever the prompt says


def template_format(router: Router, own: str | None = None) -> TemplateFormat:
    """Return what is known of the model's template, or of the request's own."""
    if own is None:
        return TemplateFormat(
            name="this model's chat template",
            source=router.tokenizer.chat_template,
            renders_tools=router.tokenizer.renders_tools,
            tool_calls=router.tool_call_parser,
            reasoning=router.reasoning_parser,
            begins_in_thought=router.begins_in_thought,
        )
    return TemplateFormat(
        name="the chat_template",
        source=own,
        renders_tools="tools" in own,  # it is a stranger's, so it is not rendered to find out
        tool_calls=tool_call_parser(router.config.tool_call_parser, own),
        reasoning=reasoning_parser(router.config.reasoning_parser, own),
        begins_in_thought=router.begins_in_thought,
    )


def check_tools(template: TemplateFormat, tools: ToolUse) -> None:
    """Raise InvalidRequest if the model could not know of tools that it may call.

    One that it must call is written by grammar, so it needs to know of none.
    """
    if not tools.functions or tools.must_call:
        return
    if not template.renders_tools:
        raise InvalidRequest(
            f"tools: {template.name} does not tell it of tools; "
            "tool_choice required, or a named function, makes it call one",
            "tools",
            "unsupported_parameter",
        )
    if not template.tool_calls:
        raise InvalidRequest(
            "tools: how this model writes calls is not known; set tool_call_parser",
            "tools",
            "unsupported_parameter",
        )


def template_variables(
    template: TemplateFormat, effort: str | None, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return what the chat template is told beside the conversation.

    Raises:
        InvalidRequest: for an effort of which it takes no notice.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template.source:
        return {"enable_thinking": False}
    if effort == DEFAULT_EFFORT or (effort == "none" and not template.reasoning):
        return {}
    raise InvalidRequest(
        f"{param}: {template.name} has no effort {effort!r}",
        param,
        "unsupported_parameter",
    )


def format_of(
    template: TemplateFormat, tools: ToolUse, *, begins_in_thought: bool, shows_reasoning: bool
) -> MessageFormat | None:
    """Return how an answer is taken apart; None: all of it is content."""
    if not (tools.functions or template.reasoning):
        return None
    way = (template.tool_calls or DEFAULT_TOOL_CALLS) if tools.functions else ""
    return MessageFormat(
        tool_calls=way,
        functions={
            function.name: function.parameters if way in BY_SCHEMA else {}
            for function in tools.functions
        },
        is_parallel=tools.is_parallel,
        reasoning=template.reasoning,
        begins_in_thought=begins_in_thought,
        shows_reasoning=shows_reasoning,
    )


def begins_in_thought(template: TemplateFormat, prompt: str, continued: JsonValue = None) -> bool:
    """Tell whether what follows a prompt is a thought, unless the model says otherwise.

    `continued` is the content that the answer goes on with, if it does.
    """
    if not template.reasoning:
        return False
    if isinstance(continued, str):
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    return template.begins_in_thought or opens_thought(prompt)
