"""What a group asks of the processes of its ranks, and of who makes them.

Knows nothing of Ray: tests and `deploy` each have launchers of their own.
"""

from collections.abc import Awaitable
from typing import Any, Protocol

from worker.protocol import RankInfo


class RankHandle(Protocol):
    """One rank as the launcher made it; calls return at once with something to await."""

    def rendezvous(self) -> Awaitable[tuple[str, int]]: ...
    def load(self, store: tuple[str, int]) -> Awaitable[RankInfo]: ...
    def serve(self, num_pages: int, num_host_pages: int) -> Awaitable[tuple[str, int]]: ...
    def load_adapter(
        self, slot: int, adapter: str, weights: tuple[float, ...], shards: tuple[Any, ...]
    ) -> Awaitable[int]: ...
    def clear_slot(self, slot: int, adapter: str) -> Awaitable[None]: ...


class RankLauncher(Protocol):
    """Makes and ends rank processes; implemented in deploy, the only place that makes actors."""

    secret: bytes

    async def launch(self) -> tuple[RankHandle, ...]:
        """Make one process for each rank and return handles in rank order."""

    async def kill(self) -> None:
        """End every process of the last launch, also one that no longer answers."""
