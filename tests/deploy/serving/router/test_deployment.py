"""A response carries its request's id once, whatever Serve's own middleware adds to it."""

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.utils import call_function_from_import_path
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cluster.api.http import RequestContext, request_id_of
from deploy.serving.haproxy.environment import MIDDLEWARES


async def tell(http: Request) -> Response:
    return PlainTextResponse(request_id_of(http))


async def asked(*given: bytes) -> httpx.Response:
    """Return what a router behind Serve answers to a request with these ids."""
    ids = Middleware(RequestContext, sends_ids=False)
    app = Starlette(routes=[Route("/", tell)], middleware=[ids])
    served = _apply_middlewares(app, call_function_from_import_path(MIDDLEWARES))  # as Serve does
    headers = [(b"X-Request-Id", one) for one in given]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served)) as client:
        return await client.get("http://router/", headers=headers)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"job-7", "job-7"),
        (b"a b<script>", "abscript"),
        (b"x" * 99, "x" * 64),
        ("naïve".encode("latin-1"), "nave"),
    ],
)
async def test_the_id_that_a_router_goes_by_is_the_one_that_is_sent(
    given: bytes, kept: str
) -> None:
    reply = await asked(given)
    assert reply.headers.get_list("x-request-id") == [kept]
    assert reply.text == kept


@pytest.mark.parametrize("given", [(), (b"<>",)])
async def test_who_gives_no_id_that_can_be_taken_gets_one(given: tuple[bytes, ...]) -> None:
    reply = await asked(*given)
    assert reply.headers.get_list("x-request-id") == [reply.text]
    assert len(reply.text) == 32


async def test_of_several_ids_the_first_counts() -> None:
    reply = await asked(b"one", b"two")
    assert reply.headers.get_list("x-request-id") == [reply.text] == ["one"]
