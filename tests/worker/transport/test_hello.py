"""Who has not said the secret: silent, slow, lying, or without a certificate; nobody waits."""

import asyncio
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.certificates import host_certificate, use_tls
from tests.patience import PATIENCE
from tests.random_cases import num_cases
from worker.transport import channel as channel_module
from worker.transport import hello
from worker.transport.channel import (
    Channel,
    ChannelClosed,
    frame,
    listen,
    receive,
    send,
    start_server,
)
from worker.transport.hello import HELLO_SECONDS, MAX_HELLO_BYTES, MAX_STRANGERS, accept, connect
from worker.transport.tls import NodeTls, node_tls

SECRET = bytes(range(32))
FOREVER = 3600.0


@pytest.fixture(params=["plain", "tls"])
def tls(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """Let both ends have certificates, or neither; the directory of the host's."""
    directory = host_certificate(tmp_path / "ca") if request.param == "tls" else None
    use_tls(monkeypatch, directory)
    return directory


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let strangers have this long."""
    monkeypatch.setattr(hello, "HELLO_SECONDS", seconds)
    monkeypatch.setattr(channel_module, "HELLO_SECONDS", seconds)


def is_ended(connection: socket.socket) -> bool:
    """Wait until the other end has closed a connection."""
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def assert_friend_is_let_in(server: socket.socket) -> None:
    """Let a friend connect, and see that nobody else was waited for."""
    with ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept, server, SECRET)
        with connect(server.getsockname(), SECRET, PATIENCE) as friend:
            send(friend, b"question")
            with accepting.result(PATIENCE) as accepted:
                assert receive(accepted) == b"question"
                send(accepted, b"answer" * 100_000)
                assert receive(friend) == b"answer" * 100_000


def test_two_who_know_the_secret_talk(tls: Path | None) -> None:
    with listen("127.0.0.1") as server:
        assert_friend_is_let_in(server)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x20",
        frame(SECRET)[:-1],
        frame(SECRET[:-1] + b"x"),
        b"\xff\xff\xff\xff",
        (MAX_HELLO_BYTES - 3).to_bytes(4, "little"),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100_000),
    ],
    ids=["silent", "starts", "stops", "guesses", "lies", "a byte too long", "asks"],
)
def test_a_stranger_is_waited_for_by_nobody(
    tls: Path | None, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    set_patience(monkeypatch, FOREVER)
    with listen("127.0.0.1") as server:
        stranger = socket.create_connection(server.getsockname())
        with stranger, ThreadPoolExecutor(1) as threads:
            sending = threads.submit(_send_until_closed, stranger, said)
            assert_friend_is_let_in(server)
            sending.result(PATIENCE)


def _send_until_closed(connection: socket.socket, said: bytes) -> None:
    try:
        connection.sendall(said)
    except OSError:
        return


def test_a_stranger_who_resets_is_waited_for_by_nobody(tls: Path | None) -> None:
    with listen("127.0.0.1") as server:
        stranger = socket.create_connection(server.getsockname())
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        stranger.close()
        assert_friend_is_let_in(server)


def test_a_stranger_who_trickles_is_sent_away_when_the_time_is_over(
    tls: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_patience(monkeypatch, 0.2)
    over = threading.Event()

    def trickle(stranger: socket.socket) -> bool:
        try:
            while not over.wait(0.02):
                stranger.sendall(b"\x01")  # a length that may be, and so may all that follows
        except OSError:
            return True
        return False

    with listen("127.0.0.1") as server, ThreadPoolExecutor(2) as threads:
        stranger = socket.create_connection(server.getsockname())
        with stranger:
            accepting = threads.submit(accept, server, SECRET)
            trickling = threads.submit(trickle, stranger)
            try:
                assert trickling.result(PATIENCE)
            finally:
                over.set()
            with connect(server.getsockname(), SECRET, PATIENCE):
                accepting.result(PATIENCE).close()


def test_many_strangers_make_room_for_a_friend(
    tls: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_patience(monkeypatch, FOREVER)
    with listen("127.0.0.1") as server, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept, server, SECRET)
        strangers = []
        for _ in range(2 * MAX_STRANGERS):
            strangers.append(socket.create_connection(server.getsockname(), PATIENCE))
        assert is_ended(strangers[0])
        with connect(server.getsockname(), SECRET, PATIENCE):
            accepting.result(PATIENCE).close()
        for stranger in strangers:
            stranger.close()


def test_friends_who_come_together_are_all_let_in(tls: Path | None) -> None:
    with listen("127.0.0.1") as server, ThreadPoolExecutor(5) as threads:
        coming = [threads.submit(connect, server.getsockname(), SECRET, PATIENCE) for _ in range(5)]
        with hello.Door(server, SECRET) as door:
            accepted = [door.accept() for _ in coming]
        for number, friend in enumerate(coming):
            send(friend.result(), bytes([number]))
        assert sorted(receive(one) for one in accepted) == [bytes([n]) for n in range(5)]
        for connection in (*accepted, *(friend.result() for friend in coming)):
            connection.close()


def test_a_server_that_waits_for_nobody_any_more_says_so(tls: Path | None) -> None:
    with listen("127.0.0.1") as server:
        server.settimeout(0.05)
        with socket.create_connection(server.getsockname()), pytest.raises(TimeoutError):
            accept(server, SECRET)
        assert server.gettimeout() == 0.05


@settings(max_examples=num_cases(60))
@given(said=st.binary(max_size=80), pieces=st.integers(1, 9))
def test_no_bytes_but_the_secret_open_a_connection(said: bytes, pieces: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stranger = hello._Stranger.__new__(hello._Stranger)
        ours.setblocking(False)
        stranger.connection, stranger._handshaking, stranger._said = ours, None, b""
        verdict = None
        for start in range(0, len(said), pieces):
            theirs.sendall(said[start : start + pieces])
            if verdict is None:
                verdict = stranger.listen(SECRET)
        assert verdict is not True
        assert len(stranger._said) <= MAX_HELLO_BYTES


@given(rest=st.binary(max_size=200))
def test_what_comes_after_the_secret_is_left_for_who_reads_on(rest: bytes) -> None:
    with listen("127.0.0.1") as server, socket.create_connection(server.getsockname()) as friend:
        friend.sendall(frame(SECRET) + frame(rest))
        with accept(server, SECRET) as accepted:
            assert receive(accepted) == rest


class Door:
    """A server of asyncio that lets in who knows the secret, and answers a frame with another."""

    def __init__(self) -> None:
        self.refused = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> tuple[str, int]:
        self._server = await start_server(self._accept, "127.0.0.1")
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await Channel.accepted(reader, writer, SECRET)
        if channel is None:
            self.refused += 1
            return
        try:
            while True:
                channel.send(await channel.receive())
        except ChannelClosed:
            channel.close()


async def echo(address: tuple[str, int], payload: bytes) -> bytes:
    friend = await Channel.connect(address, SECRET)
    friend.send(payload)
    async with asyncio.timeout(PATIENCE):
        answer = await friend.receive()
    friend.close()
    return answer


async def test_asyncio_friends_talk_while_strangers_are_silent(
    tls: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_patience(monkeypatch, FOREVER)
    door = Door()
    address = await door.open()
    strangers = [socket.create_connection(address) for _ in range(5)]
    payload = bytes(range(256)) * 5000
    assert await echo(address, payload) == payload
    for stranger in strangers:
        stranger.close()
    await door.close()


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", frame(b"guess"), b"\x20\0\0\0a", b""])
async def test_asyncio_strangers_are_sent_away_without_a_word(
    tls: Path | None, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    set_patience(monkeypatch, 0.2)
    door = Door()
    address = await door.open()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(said)
    async with asyncio.timeout(PATIENCE):
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
    # Of what is not TLS, OpenSSL says no more than that: one alert of seven bytes.
    assert answer == b"" or (tls is not None and answer[0] == 21 and len(answer) == 7)
    writer.close()
    assert await echo(address, b"friend") == b"friend"
    await door.close()


@pytest.mark.parametrize("certificate", ["none", "of another CA"])
def test_without_a_certificate_of_the_cluster_even_the_secret_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: str
) -> None:
    directory = host_certificate(tmp_path / "ca")
    use_tls(monkeypatch, directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate == "of another CA":
        _, own, key = NodeTls(host_certificate(tmp_path / "other")).files()
        context.load_cert_chain(own, key)
    with listen("127.0.0.1") as server:
        raw = socket.create_connection(server.getsockname())
        with ThreadPoolExecutor(1) as threads:
            accepting = threads.submit(accept, server, SECRET)
            with context.wrap_socket(raw) as stranger, pytest.raises(ssl.SSLError):
                stranger.sendall(frame(SECRET))
                assert stranger.recv(1), "the end, and no answer"
                raise AssertionError("a stranger was answered")
            with connect(server.getsockname(), SECRET, PATIENCE):
                accepting.result(PATIENCE).close()


def test_a_host_under_another_name_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = host_certificate(tmp_path / "ca", "198.51.100.7")
    use_tls(monkeypatch, directory)
    tls = node_tls()
    assert tls is not None
    tls.check("198.51.100.7")
    with pytest.raises(ssl.SSLCertVerificationError, match="198.51.100.8"):
        tls.check("198.51.100.8")


def test_nobody_has_forever() -> None:
    assert HELLO_SECONDS <= 5.0
    assert MAX_HELLO_BYTES <= 1024
