"""Frames over sockets, from peers that are slow, gone or hostile."""

import asyncio
import socket
import struct
import threading

import pytest

from tests.patience import PATIENCE
from worker.transport.channel import (
    MAX_FRAME_BYTES,
    BadFrame,
    Channel,
    ChannelClosed,
    frame,
    listen,
    receive,
    send,
    stop_listening,
)
from worker.transport.hello import accept


@pytest.fixture
def pair():
    """Return two connected sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5000])
def test_a_frame_arrives_whole(pair, payload):
    ours, theirs = pair
    sender = threading.Thread(target=send, args=(ours, payload))
    sender.start()
    assert receive(theirs) == payload
    sender.join()


def test_frames_keep_their_borders(pair):
    ours, theirs = pair
    ours.sendall(frame(b"one") + frame(b"") + frame(b"two"))
    assert [receive(theirs) for _ in range(3)] == [b"one", b"", b"two"]


def test_a_peer_that_goes_away_in_mid_frame_is_noticed(pair):
    ours, theirs = pair
    ours.sendall(frame(b"payload")[:-1])
    ours.close()
    with pytest.raises(ChannelClosed):
        receive(theirs)


def test_a_length_over_the_limit_is_refused_before_it_is_read(pair):
    ours, theirs = pair
    ours.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(BadFrame, match="over the limit"):
        receive(theirs)


def test_peers_without_the_secret_are_passed_over():
    with listen("127.0.0.1") as server:
        address = server.getsockname()
        strangers = [socket.create_connection(address) for _ in range(3)]
        send(strangers[0], b"guess")
        strangers[1].sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        strangers[2].close()
        with socket.create_connection(address) as friend:
            send(friend, b"secret")
            with accept(server, b"secret") as accepted:
                send(friend, b"hello")
                assert receive(accepted) == b"hello"
        for stranger in strangers:
            stranger.close()


def test_both_ends_of_an_asyncio_channel_speak_the_same_frames():
    async def talk() -> list[bytes]:
        heard: list[bytes] = []
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = await Channel.accepted(reader, writer, b"secret")
            if channel is None:
                return
            heard.append(await channel.receive())
            channel.send(b"answer")
            with pytest.raises(ChannelClosed):
                await channel.receive()
            channel.close()
            done.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        stranger = await Channel.connect(address, b"guess")
        with pytest.raises(ChannelClosed):
            await stranger.receive()
        stranger.close()
        channel = await Channel.connect(address, b"secret")
        channel.send(b"question")
        await channel.drain()
        heard.append(await channel.receive())
        channel.close()
        await asyncio.wait_for(done.wait(), PATIENCE)
        server.close()
        return heard

    assert asyncio.run(talk()) == [b"question", b"answer"]


async def test_a_connection_that_is_accepted_while_its_server_closes_is_handed_over(monkeypatch):
    entered = asyncio.Event()

    def enter(reader, writer):
        writer.close()
        entered.set()

    server = await asyncio.start_server(enter, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    create_task = loop.create_task

    def accepting(coroutine, **words):
        task = create_task(coroutine, **words)
        if coroutine.__name__ == "_accept_connection2":
            stop_listening(server)
        return task

    monkeypatch.setattr(loop, "create_task", accepting)
    with socket.create_connection(server.sockets[0].getsockname()):
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
    assert server.sockets == ()
