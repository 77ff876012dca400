"""What a route says of itself for the OpenAPI document, in one call beside its path.

Owns what a declaration may say. The document that is made of all of them is `document`'s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from cluster.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    TopworkError,
    Unavailable,
)
from cluster.router.tenancy.principal import SCOPES, Scope

Right = Literal["open", "any", "model"] | Scope  # what a caller needs: see docs/api.md
Errors = tuple[type[TopworkError], ...]

# What keeps a call from being answered, beside what holds for every route. A key may go no further
# ahead than it is allowed to.
GENERATION: Errors = (
    InvalidRequest,
    Forbidden,
    NotFound,
    Conflict,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
)
READING: Errors = tuple(error for error in GENERATION if error is not Forbidden)
PREPARATION: Errors = (InvalidRequest, Forbidden, NotFound, Conflict, Overloaded, Unavailable)
LOOKUP: Errors = (InvalidRequest, NotFound, Unavailable)
LISTING: Errors = (InvalidRequest, Unavailable)
CHANGE: Errors = (InvalidRequest, NotFound, Conflict, Overloaded, Unavailable)

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
BYTES = "application/octet-stream"
KEY = "x-topwork"  # of `openapi_extra`, where a route keeps its Operation


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the query or a header."""

    name: str
    schema: Mapping[str, Any]
    what: str
    place: Literal["query", "header"] = "query"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one route takes and answers."""

    tag: str
    summary: str
    right: Right
    body: type[BaseModel] | None = None
    body_is_optional: bool = False
    takes_bytes: bool = False  # instead of JSON
    answer: Any = None  # a type that msgspec can describe; None: an empty body
    events: tuple[Any, ...] = ()  # types of the data of a stream's events
    text: str = ""  # the media type of an answer that is text
    unwell: Any = None  # the answer of status 503, where that is no error; None: as others
    errors: Errors = ()
    errors_as: Any = None  # their body, where it is not OpenAI's
    parameters: tuple[Parameter, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # of answers, with what they say
    example: Mapping[str, Any] | None = None  # of a body
    ids: Mapping[str, str] = field(default_factory=dict)  # by method, where there are several

    @property
    def all_errors(self) -> Errors:
        """The errors of the declaration, and what follows from the right that is needed."""
        return (*self.errors, *((Forbidden,) if self.right in SCOPES else ()))


def declared(operation: Operation) -> dict[str, Any]:
    """Return an operation as the `openapi_extra` of a route."""
    return {KEY: operation}


FLAG: Mapping[str, Any] = {"type": "string", "enum": ["true", "false", "1", "0"]}
OF_STREAMS = {"X-Stream-Id": "of a resumable stream: by which it is read on"}
LIMIT = Parameter(
    "limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "entries of a page; all of them"
)
AFTER = Parameter("after", {"type": "string"}, "the name before the first entry of the page")
