"""A router as Serve's replica runs it behind direct ingress, in a process without Ray.

`python -m tests.bench.router.serving MODEL_DIR SCHEDULER` says where it listens. The HTTP server
and what wraps the application are Serve's own; the scheduler is the one at the given address.
"""

import asyncio
import sys

import msgspec
import uvloop
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.app import create_app
from cluster.messages import SchedulerAddress
from cluster.router.config import RouterConfig
from cluster.router.router import Router
from cluster.router.testing.fake_backend import FakeBackend
from tests.ports import free_port


def as_direct_ingress(app: ASGIApp) -> ASGIApp:
    """Return the application with what Serve's replica does for each request and message."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        proxy = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        receiving = proxy.fetch_until_disconnect_task()

        async def send_user_message(message: Message) -> None:
            await send(message)

        async def call_asgi() -> None:
            await app(scope, proxy, send_user_message)

        answering = asyncio.create_task(call_asgi())
        await asyncio.wait({answering, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            receiving.cancel()
            answering.result()
        else:
            answering.cancel()

    return serve


async def _serve(directory: str, address: SchedulerAddress) -> None:
    config = RouterConfig(
        model_name="model",
        model_dir=directory,
        context_length=8192,
        vocab_size=1 << 20,
        eos_token_ids=(2,),
    )
    router = Router(config, FakeBackend(address))
    await router.start()
    port = free_port()
    _, server = await start_asgi_http_server(
        as_direct_ingress(create_app(router)),
        HTTPOptions(host="127.0.0.1", port=port),
        event_loop=asyncio.get_running_loop(),
    )
    while not server.started:
        await asyncio.sleep(0.01)
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], msgspec.json.decode(sys.argv[2], type=SchedulerAddress)))
