"""tests.bench.slow_clients: what its figures are counted from."""

import socket

from tests.bench.slow_clients.clients import ADDRESSES, answers
from tests.bench.slow_clients.sockets import num_sockets
from tests.end_to_end.asking import wait_for


def test_connections_count_by_address_until_the_server_leaves_them() -> None:
    address = ADDRESSES["idle sockets"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), source_address=(address, 0)) as client:
            taken, _ = server.accept()
            assert num_sockets(port, address) == 1
            assert num_sockets(port, "127.0.0.99") == 0
            taken.sendall(b"HTTP/1.1 408 Too Late\r\n\r\n")
            taken.close()
            wait_for(lambda: num_sockets(port, address) == 0)
            client.setblocking(False)
            assert answers([client]) == {"408": 1}
            assert answers([client]) == {"closed": 1}


def test_a_client_that_was_told_nothing_yet_is_no_answer() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        assert answers([one]) == {"nothing": 1}
