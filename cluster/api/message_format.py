"""How the answer to a conversation is taken apart: its thoughts, its content, its calls.

Owns what the model's chat template must know for it: what it would ignore is refused.
"""

from typing import Any

from pydantic import JsonValue

from cluster.api.tools import ToolUse
from cluster.errors import InvalidRequest
from cluster.router.parser.families import (
    BY_SCHEMA,
    DEFAULT_TOOL_CALLS,
    MessageFormat,
    opens_thought,
)
from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.router import Router

DEFAULT_EFFORT = "medium"  # OpenAI's: it asks for nothing


def check_tools(router: Router, tools: ToolUse) -> None:
    """Raise InvalidRequest if the model could not know of tools that it may call.

    One that it must call is written by grammar, so it needs to know of none.
    """
    if not tools.functions or tools.must_call:
        return
    if not router.tokenizer.renders_tools:
        raise InvalidRequest(
            "tools: this model's chat template does not tell it of tools; "
            "tool_choice required, or a named function, makes it call one",
            "tools",
            "unsupported_parameter",
        )
    if not router.tool_call_parser:
        raise InvalidRequest(
            "tools: how this model writes calls is not known; set tool_call_parser",
            "tools",
            "unsupported_parameter",
        )


def template_variables(
    router: Router, effort: str | None, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return what the chat template is told beside the conversation.

    Raises:
        InvalidRequest: for an effort of which it takes no notice.
    """
    if effort is None:
        return {}
    template = router.tokenizer.chat_template
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in template:
        return {"enable_thinking": False}
    if effort == DEFAULT_EFFORT or (effort == "none" and not router.reasoning_parser):
        return {}
    raise InvalidRequest(
        f"{param}: this model's chat template has no effort {effort!r}",
        param,
        "unsupported_parameter",
    )


def format_of(
    router: Router, tools: ToolUse, *, begins_in_thought: bool, shows_reasoning: bool
) -> MessageFormat | None:
    """Return how an answer is taken apart; None: all of it is content."""
    if not (tools.functions or router.reasoning_parser):
        return None
    way = (router.tool_call_parser or DEFAULT_TOOL_CALLS) if tools.functions else ""
    return MessageFormat(
        tool_calls=way,
        functions={
            function.name: function.parameters if way in BY_SCHEMA else {}
            for function in tools.functions
        },
        is_parallel=tools.is_parallel,
        reasoning=router.reasoning_parser,
        begins_in_thought=begins_in_thought,
        shows_reasoning=shows_reasoning,
    )


def begins_in_thought(router: Router, prompt: str, continued: JsonValue = None) -> bool:
    """Tell whether what follows a prompt is a thought, unless the model says otherwise.

    `continued` is the content that the answer goes on with, if it does.
    """
    if not router.reasoning_parser:
        return False
    if isinstance(continued, str):
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    return router.begins_in_thought or opens_thought(prompt)
