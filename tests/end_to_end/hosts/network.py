"""A network of hosts on this machine, joined by a switch that nothing else is joined to.

Owns addresses and names, and that all of it is gone in the end.
"""

import os
import subprocess
from pathlib import Path
from types import TracebackType

from tests.end_to_end.hosts.host import Host, ip

_PREFIX = "10.77.0"


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
        for namespace in self._namespaces:
            ip("netns", "delete", namespace)

    def address(self, name: str) -> str:
        """Return the address that a host has, or would have."""
        return self._address[name]

    def start(self, name: str) -> Host:
        """Start a host."""
        assert name not in self.hosts, f"{name} is there already"
        namespace, directory = f"{self._id}-{name}", self._directory / name
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

    def _add_namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._namespaces.append(name)

    @property
    def _switch(self) -> str:
        return f"{self._id}-switch"
