"""What any router must know of a response that another one began, and for how long.

A response is a call that is kept (`cluster/engine/kept_streams.py`); its id is the stream's, which
nobody can guess. Its record has the conversation up to its own answer.
"""

import re
import secrets
from math import inf
from typing import Any

import msgspec

from cluster.api.responses.items import Turn
from cluster.api.responses.objects import Settings
from cluster.errors import InvalidRequest, NotFound
from cluster.messages import Keep
from cluster.router.config import RouterConfig
from cluster.router.output_processor import TextOptions
from cluster.router.parser.families import MessageFormat
from cluster.router.tenancy.principal import Principal

_ID = re.compile(r"resp_[0-9a-f]{48}")


class ResponseRecord(msgspec.Struct, frozen=True):
    """Whose response it is, and all of it but the answer."""

    id: str
    created_at: int  # seconds since 1970
    tenant: str
    names: tuple[str, ...]  # of the model, as metrics count it
    options: TextOptions
    shows_logprobs: bool
    is_streamed: bool
    settings: Settings
    turns: msgspec.Raw  # see `conversation`
    message_format: MessageFormat | None = None  # None: the answer is text and nothing else

    def conversation(self) -> list[Turn]:
        """Return the turns before the answer, without the instructions."""
        turns: list[Turn] = _decode_turns(self.turns)
        return turns


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ResponseRecord).decode
_decode_turns: Any = msgspec.msgpack.Decoder(list[Turn]).decode


def new_id() -> str:
    """Return an id that nobody can guess."""
    return f"resp_{secrets.token_hex(24)}"


def is_response_id(text: str) -> bool:
    """Tell whether a text can be the id of a response."""
    return _ID.fullmatch(text) is not None


def packed(turns: list[Turn], max_bytes: int) -> msgspec.Raw:
    """Return the turns of a record.

    Raises:
        InvalidRequest: if they are too large to be kept.
    """
    data = _encode(turns)
    if len(data) > max_bytes:
        raise InvalidRequest(
            f"the conversation has {len(data)} bytes, over the limit of {max_bytes} for those "
            "that are stored; begin a new one, or use store=false",
            "input",
        )
    return msgspec.Raw(data)


def keep_of(record: ResponseRecord, config: RouterConfig) -> Keep:
    """Return how a response is kept.

    In the background it needs no reader. A stream waits for its reader; what is answered at once
    can have no other, for nobody knows its id.
    """
    unread_seconds = config.stream_keep if record.is_streamed else 0.0
    if record.settings.background:
        unread_seconds = inf
    return Keep(record.id, config.response_keep, _encode(record), unread_seconds, tells=True)


def record_of(data: bytes, principal: Principal, response_id: str) -> ResponseRecord:
    """Return the record of a response.

    Raises:
        NotFound: if it is another tenant's.
    """
    record = _decode(data)
    if record.tenant != principal.tenant:
        raise unknown_response(response_id)
    return record


def unknown_response(response_id: str) -> NotFound:
    """Return the error for a response that is not there, or not for the caller."""
    return NotFound(f"Response with id {response_id[:100]!r} not found.", "response_id")
