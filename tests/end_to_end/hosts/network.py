"""A network of hosts on this machine, joined by a switch that nothing else is joined to.

Owns addresses and names, and that all of it is gone in the end.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tests.end_to_end.hosts.host import Host, ip

_PREFIX = "10.77.0"
_CLONE_NEWNET = 0x40000000  # of linux/sched.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """Hosts that see each other and nobody else; a context that ends them all."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        """Make the switch, and names for hosts that may be started.

        Args:
            directory: for keys, logs and what hosts mount; empty.
            names: of all hosts there may ever be.
        """
        self.key = directory / "key"
        self.hosts: dict[str, Host] = {}
        self._directory = directory
        self._address = {name: f"{_PREFIX}.{10 + i}" for i, name in enumerate(names)}
        self._id = f"tw{os.getpid()}"
        self._namespaces: list[str] = []
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True
        )
        (directory / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        known = "".join(f"{address} {name}\n" for name, address in self._address.items())
        (directory / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        self.shared = directory / "shared"  # which all hosts see as /shared
        self.shared.mkdir()

    def __enter__(self) -> "Network":
        self._add_namespace(self._switch)
        ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self._switch, "link", "set", "switch", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.hosts.values():
            if host.is_there:
                host.lose()
        for namespace in list(self._namespaces):
            self._remove_namespace(namespace)

    def address(self, name: str) -> str:
        """Return the address that a host has, or would have."""
        return self._address[name]

    def start(self, name: str) -> Host:
        """Start a host; one that was lost comes back without anything that it had written."""
        namespace, directory = self._namespace(name), self._directory / name
        if name in self.hosts:
            assert not self.hosts[name].is_there, f"{name} is there already"
            ip("-n", self._switch, "link", "delete", f"to-{name}")
            self._remove_namespace(namespace)
            directory.rmdir()
        directory.mkdir()
        self._add_namespace(namespace)
        cable = ["link", "add", "eth0", "netns", namespace, "type", "veth"]
        ip(*cable, "peer", "name", f"to-{name}", "netns", self._switch)
        ip("-n", self._switch, "link", "set", f"to-{name}", "master", "switch", "up")
        ip("-n", namespace, "address", "add", f"{self._address[name]}/24", "dev", "eth0")
        ip("-n", namespace, "link", "set", "eth0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        host = Host(namespace, name, self._address[name], directory)
        self.hosts[name] = host
        return host

    def cut(self, name: str) -> None:
        """Pull a host's cable: nothing reaches it, and nobody hears that it has gone."""
        ip("-n", self._switch, "link", "set", f"to-{name}", "down")

    def mend(self, name: str) -> None:
        """Put the cable back."""
        ip("-n", self._switch, "link", "set", f"to-{name}", "up")

    @contextmanager
    def seen_from(self, name: str) -> Iterator[None]:
        """Let this thread, and the threads that it starts here, have the network of a host."""
        own, theirs = "/proc/thread-self/ns/net", f"/run/netns/{self._namespace(name)}"
        with open(own) as before, open(theirs) as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def _namespace(self, name: str) -> str:
        return f"{self._id}-{name}"

    def _add_namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._namespaces.append(name)

    def _remove_namespace(self, name: str) -> None:
        ip("netns", "delete", name)
        self._namespaces.remove(name)

    @property
    def _switch(self) -> str:
        return f"{self._id}-switch"


def _enter(namespace: int) -> None:
    failed = _LIBC.setns(namespace, _CLONE_NEWNET)
    assert not failed, f"setns: {os.strerror(ctypes.get_errno())}"
