"""HAProxy as our settings let Serve run it: how many connections one address may have."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from deploy.serving.haproxy.front_door import FrontDoor
from tests.deploy.serving.running_haproxy import Front, running_front
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

MOST = 20  # connections of one address
TRUSTED = "127.0.0.9"
DOOR = FrontDoor(idle_timeout=6, max_connections_per_address=MOST, trusted_proxy=("127.0.0.8/31",))


def answer(connection: socket.socket, head: bytes) -> None:
    """Answer at once."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    """One HAProxy for all tests."""
    with running_front(answer, DOOR) as running:
        yield running


def asked(front: Front, address: str) -> tuple[int, bytes]:
    """Return status and body of the answer to one address; 0 if the connection is refused."""
    with suppress(ConnectionError):
        with socket.create_connection(
            ("127.0.0.1", front.port), PATIENCE, source_address=(address, 0)
        ) as client:
            client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            received = b""
            while part := client.recv(65536):
                received += part
        if received:
            head, _, body = received.partition(b"\r\n\r\n")
            return int(head.split()[1]), body
    return 0, b""


def fill(front: Front, address: str, number: int, held: ExitStack) -> None:
    for _ in range(number):
        held.enter_context(
            socket.create_connection(
                ("127.0.0.1", front.port), PATIENCE, source_address=(address, 0)
            )
        )


def test_one_address_that_has_all_it_may_is_told_so_and_others_are_served(front: Front) -> None:
    with ExitStack() as held:
        fill(front, "127.0.0.2", MOST - 1, held)
        assert asked(front, "127.0.0.2")[0] == 200
        fill(front, "127.0.0.2", 1, held)
        status, body = asked(front, "127.0.0.2")
        assert status == 429
        assert json.loads(body)["error"]["message"].startswith(f"over {MOST} connections from")
        fill(front, "127.0.0.2", 2, held)
        assert asked(front, "127.0.0.2")[0] == 0
        assert asked(front, "127.0.0.3")[0] == 200
    wait_for(lambda: asked(front, "127.0.0.2")[0] == 200)


def test_a_trusted_proxy_may_have_any_number(front: Front) -> None:
    with ExitStack() as held:
        fill(front, TRUSTED, 2 * MOST, held)
        assert asked(front, TRUSTED)[0] == 200
