"""A Ray cluster by hand whose nodes are hosts of their own, with the application on it.

Owns what docs/operations.md tells an operator to run on each node; which host has what; and how
clients on a host ask.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.end_to_end.asking import Endpoint, wait_for
from tests.end_to_end.hosts.host import Host
from tests.end_to_end.hosts.network import Network
from tests.end_to_end.server import MODEL_DIR

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
HEAD = "head"
ROUTER = "ray::ServeReplica:topwork:Router"
SCHEDULER = "ray::ServeReplica:topwork:Scheduler"
POOL = "ray::ServeReplica:topwork:AdapterPool"
RANK = "ray::WorkerActor"
PORT = 8000
GCS_PORT = 6379
TOKEN = "of a test, and of nobody else: 0123456"


class RayHosts(Endpoint):
    """A head that computes nothing, and hosts that join it."""

    def __init__(self, network: Network, *, is_encrypted: bool = False, **environment: str) -> None:
        """Start the head, whose HAProxy clients ask at first.

        Args:
            network: of all hosts.
            is_encrypted: whether hosts have certificates and trust nothing else.
            environment: more of it, for Ray on every host.
        """
        self.network = network
        self.ask(HEAD)
        patience = {"RAY_raylet_start_wait_time_s": "120"}  # on a busy machine a start takes long
        self._environment = {"RAY_AUTH_TOKEN": TOKEN} | patience | environment
        self._is_encrypted = is_encrypted
        self.start_head()

    def ask(self, name: str) -> None:
        """Let clients ask the HAProxy of this host from now on."""
        self.url = f"http://{self.network.address(name)}:{PORT}"

    def start_head(self) -> None:
        """Start the head's host and Ray on it; what Ray stored on /shared is there again.

        Ray is started again whenever it ends, as a service is: Ray 2.60's GCS aborts, sometimes,
        when a placement group over several hosts is removed after a head has come back.
        """
        host = self.network.start(HEAD)
        start = self._command(
            *(HEAD, "--head", "--block", f"--port={GCS_PORT}", "--num-cpus=0"),
            *(f"--dashboard-host={self._dashboard}", "--object-store-memory=200000000"),
        )
        log = "/root/head.log"
        self._run(
            host, f"setsid --fork sh -c 'while true; do {start}; done' > {log} 2>&1 </dev/null"
        )
        wait_for(lambda: "Ray runtime started" in host.run("cat", log))

    def join(self, name: str, num_cpus: int) -> None:
        """Start a host and let it join."""
        self._start(name, f"--address={self._head_address}", f"--num-cpus={num_cpus}")

    def rejoin(self, name: str, num_cpus: int) -> None:
        """Let a host that runs join a head that knows nothing of it."""
        command = self._command(name, f"--address={self._head_address}", f"--num-cpus={num_cpus}")
        self._run(self.network.hosts[name], f"ray stop --force; {command}")

    def _start(self, name: str, *options: str) -> None:
        self._run(self.network.start(name), self._command(name, *options))

    def _command(self, name: str, *options: str) -> str:
        words = [f"--node-ip-address={self.network.address(name)}", *options]
        if not any("object-store" in word for word in words):
            words.append("--object-store-memory=100000000")
        return f"ray start {' '.join(words)}"

    def _run(self, host: Host, command: str) -> str:
        exports = "".join(f"export {key}={value!r}; " for key, value in self._environment.items())
        prepare = f"export PATH={BIN}:$PATH PYTHONPATH={ROOT}"
        asked = "topwork environment"
        if self._is_encrypted:
            made = f"/shared/tls/{host.address}"
            prepare += f"; [ -d {made} ] || topwork certificates /shared/tls {host.address} || exit"
            asked += f" --tls {made}"
        return host.run(
            "bash", "-c", f'{prepare}; eval "$({asked})"; {exports}{command}', timeout=240
        )

    @property
    def _dashboard(self) -> str:
        """Where the dashboard listens: not on the network where that is not to be trusted."""
        return "127.0.0.1" if self._is_encrypted else self.network.address(HEAD)

    @property
    def _head_address(self) -> str:
        return f"{self.network.address(HEAD)}:{GCS_PORT}"

    def deploy(self, **arguments: Any) -> None:
        """`serve deploy` on the head of a configuration whose `args` are these."""
        default = {"model": str(MODEL_DIR), "served_model_name": "smollm2", "anonymous": True}
        document = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": PORT},
            "applications": [
                {
                    "name": "topwork",
                    "route_prefix": "/",
                    "import_path": "deploy.serving.app:build",
                    "args": default | arguments,
                }
            ],
        }
        host = self.network.hosts[HEAD]
        write = host.command("sh", "-c", "cat > /root/serve.yaml")
        subprocess.run(write, input=yaml.safe_dump(document), text=True, check=True)
        dashboard = f"http://{self._dashboard}:8265"
        self._run(host, f"serve deploy /root/serve.yaml -a {dashboard}")

    def empty(self, name: str) -> None:
        """Let Serve move what runs on a host, as docs/operations.md says; return when it has."""
        self._run(self.network.hosts[name], "python -m deploy.ray.leave")

    def lose(self, name: str) -> None:
        """Take the power of a host away: nobody hears from it again, not even that it ends."""
        self.network.cut(name)
        self.network.hosts[name].lose()

    def hosts_of(self, start: str) -> list[str]:
        """Return the names of the hosts with a process whose title starts so, one for each."""
        return [
            name
            for name, host in self.network.hosts.items()
            if host.is_there
            for line in host.processes()
            if line.startswith(start)
        ]

    def is_ready(self) -> bool:
        """Tell whether whoever is asked answers that requests are served."""
        with self.client() as client:
            try:
                return client.get("/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

    def logs(self) -> str:
        """Return the ends of the logs of Serve and of our actors on all hosts."""
        told = []
        script = "cd /tmp/ray/session_latest/logs && tail -n 25 serve/*.log worker-*.err"
        for name, host in self.network.hosts.items():
            if host.is_there:
                ran = subprocess.run(
                    host.command("sh", "-c", script), capture_output=True, text=True
                )
                told.append(f"######## {name}\n{ran.stdout[-20000:]}")
        return "\n".join(told)


@contextmanager
def cluster_of_hosts(
    directory: Path, cpus: dict[str, int], **environment: str
) -> Iterator[RayHosts]:
    """A head and workers with so many CPUs; clients are on a host that computes nothing."""
    with Network(directory, (HEAD, "clients", *cpus)) as network:
        network.start("clients")
        running = RayHosts(network, **environment)
        for name, count in cpus.items():
            running.join(name, count)
        with network.seen_from("clients"):
            yield running
