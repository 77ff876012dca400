"""Ports that tests give to servers are free, differ, and are not among those the kernel gives."""

import socket
from pathlib import Path

import pytest

from tests import ports
from tests.ports import free_port


def test_ports_differ_and_can_be_listened_on() -> None:
    found = [free_port() for _ in range(20)]
    assert len(set(found)) == len(found)
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(ports, "FIRST", first)
    monkeypatch.setattr(ports, "COUNT", 1)
    with socket.create_server(("127.0.0.1", first)), pytest.raises(OSError, match="are taken"):
        free_port()
    assert free_port() == first


def test_the_kernel_gives_none_of_them_to_whoever_asks_for_any() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given.exists():
        pytest.skip("no Linux")
    assert int(given.read_text().split()[0]) >= ports.FIRST + ports.COUNT
