"""From the messages of a conversation to its prompt.

Owns what a conversation may hold.
"""

from typing import Any

from pydantic import JsonValue

from cluster.api.schemas.requests import ConversationBody, Message
from cluster.errors import InvalidRequest
from cluster.router.router import Router


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the turns as a chat template takes them, their parts of text joined by newlines."""
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        param = f"messages.{number}"
        _refuse_extras(message.model_extra or {}, param)
        turn = {"role": message.role, "content": _content(message.content, f"{param}.content")}
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def _content(value: JsonValue, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{param}: must be a string or a list of text parts", param)
    texts = []
    for number, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text"):
            raise InvalidRequest(f"{param}: only parts of type text are supported", param)
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{param}: a part of type text has no text", param)
        extras = {name: value for name, value in part.items() if name not in ("type", "text")}
        _refuse_extras(extras, f"{param}.{number}")
        texts.append(text)
    return "\n".join(texts)


def _refuse_extras(extras: dict[str, JsonValue], where: str) -> None:
    """Raise InvalidRequest for the first of what is not known and says something."""
    for name, value in sorted(extras.items()):
        if value is not None and value != []:
            param = f"{where}.{name[:100]}"
            raise InvalidRequest(f"{param} is not supported", param, "unsupported_parameter")


async def conversation_tokens(
    router: Router, body: ConversationBody, add_special_tokens: bool
) -> tuple[int, ...]:
    """Return a conversation as tokens."""
    continues = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    if continues and opens:
        raise InvalidRequest(
            "continue_final_message: cannot be together with add_generation_prompt",
            "continue_final_message",
        )
    text = await router.render(
        conversation(body.messages),
        add_generation_prompt=not continues and opens is not False,
        continue_final_message=continues,
        variables=body.chat_template_kwargs or {},
    )
    token_ids = await router.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("messages: they render to an empty prompt", "messages")
    return token_ids
