"""Everything that can go wrong for a caller, each kind with one HTTP status.

    TopworkError
    ├── InvalidRequest        400  a parameter or body that cannot be served, with the reason
    │   └── InvalidAdapter    400  an adapter directory that fails a check, with the offending keys
    ├── Unauthorized          401  no key, or an unknown one
    ├── Forbidden             403  a known key that may not do this
    ├── NotFound              404  unknown model, adapter or route
    ├── MethodNotAllowed      405  a route that is not called so
    ├── RequestTimeout        408  the body has not come in time
    ├── Conflict              409  the adapter is in a state that forbids the call
    ├── Overloaded            429  a queue limit is reached; Retry-After tells when to come back
    ├── Internal              500  our fault, with what is known
    ├── Unavailable           503  the ranks are down or starting; Retry-After tells when
    └── DeadlineExceeded      504  the request has taken longer than it may

All arguments reach `super().__init__`, so that every error keeps its type when pickled.
"""

from typing import ClassVar

import msgspec


class TopworkError(Exception):
    """An error with a message for the caller, an HTTP status and OpenAI's error type."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, param, code, retry_after)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds

    def __str__(self) -> str:
        return self.message


class InvalidRequest(TopworkError):
    """A request that cannot be served as it stands."""

    status = 400
    kind = "invalid_request_error"


class InvalidAdapter(InvalidRequest):
    """An adapter that fails a check at the door."""


class Unauthorized(TopworkError):
    """A missing or unknown API key."""

    status = 401
    kind = "authentication_error"


class Forbidden(TopworkError):
    """A known API key without the right to do this."""

    status = 403
    kind = "permission_error"


class NotFound(TopworkError):
    """A model, adapter or route that does not exist."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowed(TopworkError):
    """A route that knows no such method."""

    status = 405
    kind = "invalid_request_error"


class RequestTimeout(TopworkError):
    """A body that has not come in time."""

    status = 408
    kind = "timeout_error"


class Conflict(TopworkError):
    """A call that the present state of its object forbids."""

    status = 409
    kind = "conflict_error"


class Overloaded(TopworkError):
    """A queue limit is reached."""

    status = 429
    kind = "rate_limit_error"


class Internal(TopworkError):
    """A fault on our side."""


class Unavailable(TopworkError):
    """The ranks that would answer are down or not up yet."""

    status = 503
    kind = "service_unavailable_error"


class Replaced(Unavailable):
    """What was asked has begun to end, and has done nothing: another one answers, or soon will."""


class DeadlineExceeded(TopworkError):
    """A request that has taken longer than it may."""

    status = 504
    kind = "timeout_error"


MODEL_NOT_FOUND = "model_not_found"  # OpenAI's code


def model_not_found(name: str, param: str = "model") -> NotFound:
    """Return OpenAI's error for a model that does not exist, though `param` names it."""
    return NotFound(f"the model {name[:256]!r} does not exist", param, MODEL_NOT_FOUND)


def adapter_not_found(name: str) -> NotFound:
    """Return vLLM's error for an adapter to unload that does not exist."""
    return NotFound(f"The lora adapter {name[:256]!r} cannot be found.", "lora_name")


BY_NAME: dict[str, type[TopworkError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        InvalidAdapter,
        Unauthorized,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        RequestTimeout,
        Conflict,
        Overloaded,
        Internal,
        Unavailable,
        Replaced,
        DeadlineExceeded,
    )
}


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A TopworkError on the wire; `name` is a key of BY_NAME."""

    name: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


def error_info(error: TopworkError) -> ErrorInfo:
    """Return an error as it travels."""
    return ErrorInfo(
        type(error).__name__, error.message, error.param, error.code, error.retry_after
    )


def error_from(info: ErrorInfo) -> TopworkError:
    """Return an error from the wire as an exception; one of an unknown name is Internal."""
    return BY_NAME.get(info.name, Internal)(info.message, info.param, info.code, info.retry_after)
