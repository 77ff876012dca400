"""uvicorn without its pauses: a thousand tests end one, which takes it a fifth of a second."""

import asyncio
import socket

import uvicorn

INTERVAL = 0.002  # seconds between two looks whether all connections are closed


class QuickServer(uvicorn.Server):
    """Ends as soon as `end` is called, from its own loop, and all connections are closed."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Take no more connections, let the open ones finish, and return from `serve`."""
        self._ending.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers of every response
        await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for one in (*self.servers, *(sockets or [])):
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(INTERVAL)
        for server in self.servers:
            await server.wait_closed()
