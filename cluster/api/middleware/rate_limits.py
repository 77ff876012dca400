"""The one door of all calls that a model answers: limits of keys and tenants, and their headers.

A route lets its caller in before it reads the body, and reserves what the answers may take before
it submits them. The middleware tells on every answer what is left, and gives back what was taken if
the answers never began.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.request import Request
from cluster.router.router import Router
from cluster.router.tenancy.admission import Admission
from cluster.router.tenancy.principal import Principal

_STATE = "admission"


async def let_in(http: HttpRequest, router: Router, principal: Principal) -> None:
    """Count a call as a request of its caller.

    Raises:
        Overloaded: if that is over a limit.
        Unavailable: if nobody can tell for now.
    """
    limits = principal.counted_limits()
    if limits:
        admission = Admission(router.budgets, limits, partial(router.metrics.rejected, "limit"))
        http.scope["state"][_STATE] = admission  # first: a refusal tells what is left, too
        await admission.begin()


def admission_of(http: HttpRequest) -> Admission | None:
    """Return what a call has taken; None: its caller has no limits, or it is not counted."""
    admission: Admission | None = http.scope["state"].get(_STATE)
    return admission


async def reserve(
    admission: Admission | None, prompts: Sequence[tuple[Request, ...]], *, is_bounded: bool
) -> Admission | None:
    """Take what the answers may need; return what is to be settled with. Raises as `let_in`."""
    if admission is not None:
        await admission.reserve(prompts, is_bounded=is_bounded)
    return admission


def reading_on(router: Router, principal: Principal) -> Admission | None:
    """Return what counts the rest of an answer that another call began; None: nothing does."""
    limits = principal.counted_limits()
    if not limits:
        return None
    admission = Admission(router.budgets, limits)
    admission.read_on()
    return admission


def rate_limit_headers(admission: Admission) -> list[tuple[bytes, bytes]]:
    """Return OpenAI's headers of what is left, of the limits that there are."""
    headers = []
    for one in admission.limits():
        for name, value in (
            ("limit", str(one.limit)),
            ("remaining", str(one.remaining)),
            ("reset", duration(one.reset)),
        ):
            headers.append((f"x-ratelimit-{name}-{one.meter}".encode(), value.encode()))
    return headers


def duration(seconds: float) -> str:
    """Return a time as OpenAI spells it: 1m0s, 6.5s, 250ms."""
    milliseconds = ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    spelled = f"{rest / 1000:g}s"
    return f"{minutes}m{spelled}" if minutes else spelled


class RateLimits:
    """Adds the headers, and ends what a call has taken."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; look at the beginning of its response and wait for its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]

        async def send_with_limits(message: Message) -> None:
            admission: Admission | None = state.get(_STATE)
            if admission is not None and message["type"] == "http.response.start":
                if message["status"] == 429 or message["status"] >= 500:
                    admission.was_not_served()
                headers = [*message["headers"], *rate_limit_headers(admission)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            admission: Admission | None = state.get(_STATE)
            if admission is not None:
                admission.is_over()
