"""A router hands an upload on in bounded pieces, and leaves nothing of one that fails."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.errors import InvalidAdapter, Unavailable
from cluster.router.testing.fake_backend import FakeBackend
from cluster.router.uploads import PIECE_BYTES, Upload, pieces, send


async def parts(*sizes: int) -> AsyncIterator[bytes]:
    for number, size in enumerate(sizes):
        yield bytes([number]) * size


async def test_small_parts_are_gathered_and_nothing_is_lost_or_empty() -> None:
    sizes = (10, PIECE_BYTES, 0, PIECE_BYTES - 1, 1, 5)
    got = [piece async for piece in pieces(parts(*sizes))]
    assert [len(piece) for piece in got] == [PIECE_BYTES + 10, PIECE_BYTES, 5]
    assert b"".join(got) == b"".join([part async for part in parts(*sizes)])
    assert [piece async for piece in pieces(parts(0))] == []


async def test_a_caller_who_goes_away_leaves_nothing() -> None:
    backend = FakeBackend()

    async def endless() -> AsyncIterator[bytes]:
        yield bytes(PIECE_BYTES)
        await asyncio.Event().wait()

    task = asyncio.create_task(send(backend, "law", endless(), Upload()))
    while not backend.uploads.get("law"):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (backend.uploads, backend.aborted) == ({}, ["law"])


async def test_the_reason_of_a_failure_is_told_also_where_the_pool_has_gone_since() -> None:
    backend = FakeBackend()

    async def down(upload: str) -> None:
        raise Unavailable("the adapter pool is down")

    backend.abort_upload = down  # type: ignore[method-assign]
    with pytest.raises(InvalidAdapter, match="damaged"):
        await send(backend, "law", broken(), Upload())


async def broken() -> AsyncIterator[bytes]:
    yield b"broken"
