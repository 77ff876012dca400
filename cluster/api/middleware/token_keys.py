"""Lets a call whose token is signed with a key that is not known wait until keys were fetched."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.auth import presented_key
from cluster.router.tenancy.oidc.token_ring import TokenRing
from cluster.router.tenancy.oidc.verifier import has_form


class FreshTokenKeys:
    """Middleware for routers that take tokens: an issuer changes its keys as it likes."""

    def __init__(self, app: ASGIApp, tokens: TokenRing) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, at once in nearly all cases."""
        if scope["type"] == "http":
            token = presented_key(Headers(scope=scope))
            if token is not None and has_form(token) and self._tokens.lacks_key_of(token):
                await self._tokens.keys.search()
        await self._app(scope, receive, send)
