"""HAProxy as our settings let Serve run it with a certificate."""

import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from deploy.serving.haproxy.front_door import FrontDoor
from tests.deploy.certificates import write_certificate
from tests.deploy.serving.running_haproxy import Front, running_front
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

go_on = threading.Event()


def answer(connection: socket.socket, head: bytes) -> None:
    """Answer at once, or in two parts."""
    if b"/parts" not in head:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        return
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
    go_on.wait(PATIENCE)
    connection.sendall(b"b")


def any_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificate")


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Front]:
    """One HAProxy with TLS for all tests."""
    cert, key = write_certificate(folder, "first")
    door = FrontDoor(head_timeout=1, idle_timeout=6, tls_cert=str(cert), tls_key=str(key))
    with running_front(answer, door, any_certificate()) as running:
        yield running


def shown(front: Front) -> str:
    """Return the name in the certificate that a new connection is shown."""
    with front.connect() as client:
        assert isinstance(client, ssl.SSLSocket)
        data = client.getpeercert(binary_form=True)
    assert data is not None
    (name,) = x509.load_der_x509_certificate(data).subject
    return str(name.value)


def test_a_client_that_trusts_the_certificate_is_answered(front: Front, folder: Path) -> None:
    trusting = ssl.create_default_context(cafile=folder / "cert.pem")
    plain = socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE)
    with trusting.wrap_socket(plain, server_hostname="localhost") as client:
        assert client.version() in ("TLSv1.2", "TLSv1.3")
        client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_whoever_speaks_without_tls_gets_no_answer(front: Front) -> None:
    with socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE) as client:
        client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in client.recv(65536)


def test_old_versions_of_tls_are_refused(front: Front) -> None:
    old = any_certificate()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    plain = socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE)
    with plain, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(plain)


def test_a_new_certificate_counts_soon_and_cuts_no_stream(front: Front, folder: Path) -> None:
    pid = front.managers[-1].reload()
    go_on.clear()
    with front.connect() as client:
        client.sendall(b"GET /parts HTTP/1.1\r\nHost: x\r\n\r\n")
        received = client.recv(65536)
        write_certificate(folder, "second")
        wait_for(lambda: shown(front) == "second")
        os.kill(pid, 0)  # the same process
        (folder / "key.pem").write_text("broken")
        go_on.set()
        while not received.endswith(b"ab"):
            part = client.recv(65536)
            assert part, received
            received += part
    assert shown(front) == "second"


def test_haproxy_that_dies_comes_back_with_the_last_good_certificate(front: Front) -> None:
    os.kill(front.managers[-1].reload(), signal.SIGKILL)
    wait_for(lambda: front.status() == 200)
    assert shown(front) == "second"


def test_a_manager_that_takes_haproxy_over_gives_it_what_came_meanwhile(
    front: Front, folder: Path
) -> None:
    front.managers[-1].process.kill()
    front.managers[-1].process.wait(PATIENCE)
    write_certificate(folder, "third")
    front.managers.append(front.start_manager())
    wait_for(lambda: shown(front) == "third")
    assert front.managers[-1].reload() != front.managers[-1].first_pid
    assert shown(front) == "third"
