"""Who makes an HTTP call: the key or token in its headers, its rights, and the audit log.

What a key or a token is and what it may do is `cluster.router.tenancy`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from cluster.api.error_handlers import CLIENT_CLOSED_REQUEST
from cluster.api.http import forwarded_for, request_id_of
from cluster.errors import Forbidden, NotFound, TopworkError, Unauthorized, Unavailable
from cluster.router.request_log.entry import current_entry
from cluster.router.router import Router
from cluster.router.tenancy.audit_log import Action, AuditEntry, Value
from cluster.router.tenancy.oidc.verifier import has_form, refused
from cluster.router.tenancy.principal import ANONYMOUS, ANYONE, Principal, Scope


@dataclass(frozen=True, slots=True)
class AdministrativeCall:
    """A call that changes what is served, or reads what others have asked, by who may."""

    principal: Principal
    entry: AuditEntry

    def change(self, adapter: str, otherwise: NotFound, **details: Value) -> None:
        """Note that the call is to change an adapter that should be there.

        Raises:
            NotFound: `otherwise`, if the caller may not see one of this name.
            Forbidden: if the caller may see it but not change it.
        """
        self.entry.about(adapter, **details)
        if not self.principal.may_see(adapter):
            raise otherwise
        self.principal.require_name(adapter)

    def load(self, adapter: str, **details: Value) -> None:
        """Note that the call is to load something under a name.

        Raises:
            Forbidden: if the caller may not use the name so, whether it is taken or not.
        """
        self.entry.about(adapter, **details)
        self.principal.require_name(adapter)


class Authenticator:
    """Tells who makes a call, from the keys and tokens that one router knows at the time."""

    def __init__(self, router: Router) -> None:
        self._ring = None if router.keys is None else router.keys.ring
        self._tokens = router.tokens
        self._without_keys = ANONYMOUS if router.config.anonymous else ANYONE
        self._router_id = router.router_id

    @property
    def are_on(self) -> bool:
        """Whether callers need a key, or a token."""
        return self._ring is not None or self._tokens is not None

    @property
    def may_forbid(self) -> bool:
        """Whether there may be callers that lack a scope."""
        return self.are_on or self._without_keys is ANONYMOUS

    def authenticate(self, http: HttpRequest) -> Principal:
        """Return who calls.

        A key may come as Anthropic's clients send it, in X-Api-Key; Authorization goes first.

        Raises:
            Unauthorized: if there is no key or token, or one that is not known or whose time is
                over.
            Forbidden: if nothing says what the holder of a good token may do.
            Unavailable: if nobody can tell for now whether a token is good.
        """
        principal = self._principal(http)
        entry = current_entry()
        if entry is not None:
            entry.of(principal)
        return principal

    def _principal(self, http: HttpRequest) -> Principal:
        if not self.are_on:
            return self._without_keys
        key = presented_key(http.headers)
        if key is None:
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY")
        ring = self._ring
        if self._tokens is not None and has_form(key) and not (ring and ring.knows(key)):
            return self._tokens.identify(key)
        if ring is None:
            raise refused("it is no JSON Web Token")
        return ring.identify(key)

    def require(self, http: HttpRequest, scope: Scope) -> Principal:
        """Return who calls, who has a scope; raises as `authenticate`, and Forbidden."""
        principal = self.authenticate(http)
        principal.require(scope)
        return principal

    def may(self, http: HttpRequest, scope: Scope) -> bool:
        """Return whether a caller has a scope; one without a known key has none."""
        try:
            return scope in self.authenticate(http).scopes
        except (Unauthorized, Forbidden, Unavailable):
            return False

    @contextmanager
    def administrative(
        self, http: HttpRequest, action: Action, scope: Scope
    ) -> Iterator[AdministrativeCall]:
        """Hold a call that needs a scope; when it ends, so or so, it is in the audit log.

        Raises:
            Unauthorized, Forbidden: as `require`, which the log tells as well.
        """
        entry = AuditEntry(
            action=action,
            router=self._router_id,
            request_id=request_id_of(http),
            client=http.client.host if http.client is not None else None,
            forwarded_for=forwarded_for(http.headers),
        )
        try:
            principal = self.authenticate(http)
            entry.of(principal)
            principal.require(scope)
            yield AdministrativeCall(principal, entry)
        except BaseException as error:
            entry.ended(*_outcome(error))
            raise
        entry.ended(200)


def presented_key(headers: Headers) -> str | None:
    """Return the key or token that the headers of a call carry, if any."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    if authorization is None and key is not None:
        authorization = f"Bearer {key}"
    scheme, _, key = (authorization or "").partition(" ")
    return key if scheme.lower() == "bearer" and key else None


def _outcome(error: BaseException) -> tuple[int, str]:
    """Return the status that a call is answered with, and why."""
    if isinstance(error, TopworkError):
        return error.status, error.message
    if isinstance(error, Exception) and not isinstance(error, ClientDisconnect):
        return 500, type(error).__name__
    return CLIENT_CLOSED_REQUEST, "cut off before its end"
