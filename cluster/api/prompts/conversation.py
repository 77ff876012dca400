"""From the messages of a conversation to its prompt.

Owns what a conversation may hold. What else a message says than its role and its content, and what
a role is, is the chat template's to know.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from cluster.api.prompts.bounds import MAX_VALUES, values_in
from cluster.api.prompts.tool_turns import ToolTurns
from cluster.api.schemas.requests import ConversationBody, Message
from cluster.errors import InvalidRequest
from cluster.router.router import Router

MAX_EXTRAS = 64  # other keys of one message
MAX_KEY_LENGTH = 128  # characters
_SPEAKERS = frozenset({"system", "developer", "user"})  # who has no turn without a content
_TEXT_PARTS = ("text", "refusal")  # the type of a part, and the key of its text


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the turns as a chat template takes them, their parts of text joined by newlines.

    Raises:
        InvalidRequest: for what is no text, and for more other keys or values than are taken.
    """
    turns: list[dict[str, Any]] = []
    num_left = MAX_VALUES
    tool_turns = ToolTurns()
    for number, message in enumerate(messages):
        param = f"messages.{number}"
        extras = _extras(message.model_extra or {}, param)
        if extras:
            num_left -= values_in(extras, param, num_left)
        fields = tool_turns.fields_of(message, param)
        content = content_of(message, f"{param}.content")
        turn = {**extras, "role": message.role, "content": content, **fields}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def content_of(message: Message, param: str = "content") -> str:
    """Return what a turn says; raises as `conversation`."""
    value = message.content
    if isinstance(value, str):
        return value
    if value is None and message.role not in _SPEAKERS:
        return ""
    if not isinstance(value, list):
        raise InvalidRequest(f"{param}: must be a string or a list of text parts", param)
    return "\n".join([_text(part, param) for part in value])


def _text(part: JsonValue, param: str) -> str:
    """Return what a part says; what else it has (`cache_control`, `annotations`) says nothing."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise InvalidRequest(f"{param}: only parts of type text are supported", param)
    text = part.get(str(kind))
    if not isinstance(text, str):
        raise InvalidRequest(f"{param}: a part of type {kind} has no {kind}", param)
    return text


def _extras(extras: dict[str, JsonValue], where: str) -> dict[str, JsonValue]:
    """Return what is not null of a message's other keys, for the template."""
    said: dict[str, JsonValue] = {k: value for k, value in extras.items() if value is not None}
    if len(said) > MAX_EXTRAS:
        raise InvalidRequest(f"{where}: more than {MAX_EXTRAS} other keys", where)
    for name in sorted(said):
        param = f"{where}.{name[:100]}"
        if len(name) > MAX_KEY_LENGTH:
            raise InvalidRequest(f"{param}: over {MAX_KEY_LENGTH} characters", param)
    return said


async def conversation_tokens(
    router: Router,
    body: ConversationBody,
    add_special_tokens: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[int, ...]:
    """Return a conversation as tokens."""
    text = await conversation_text(router, body, list(tools), {})
    return await text_tokens(router, text, add_special_tokens)


async def conversation_text(
    router: Router,
    body: ConversationBody,
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> str:
    """Return a conversation as text.

    Args:
        tools: that the model is told of.
        variables: of the template; what the body says goes before.
    """
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    if continues and opens:
        raise InvalidRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    if body.chat_template is not None and not router.config.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template: this server renders conversations by the model's own template only "
            "(--trust-request-chat-template lets requests bring theirs)",
            "chat_template",
            "unsupported_parameter",
        )
    for name, value in (
        ("chat_template_kwargs", body.chat_template_kwargs),
        ("documents", body.documents),
    ):
        if value:
            values_in(value, name)
    return await router.render(
        await router.apart(body.messages, conversation, body.messages),
        add_generation_prompt=not continues and opens is not False,
        continue_final_message=continues,
        variables=variables | (body.chat_template_kwargs or {}),
        tools=tools or None,
        documents=body.documents or None,
        chat_template=body.chat_template,
    )


async def text_tokens(router: Router, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the tokens of a rendered conversation."""
    token_ids = await router.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("messages: they render to an empty prompt", "messages")
    return token_ids
