"""What an operator does at a terminal beside the cluster: "ray up" in docs/operations.md.

Owns the operator's files and what is changed of the shipped ones: addresses, the account and its
key, and that packages are not installed but lent by this machine.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.end_to_end.hosts.host import Host
from tests.end_to_end.hosts.network import Network

ROOT = Path(__file__).parents[3]
VENV = Path(sys.executable).parent.parent
KEY = "the-key-of-the-test"
_CLUSTER_FILE = "/root/cluster.yaml"
_KEY_FILE = "/root/.topwork/keys.yaml"  # on every host
_ENVIRONMENT = (
    f"export PATH={VENV}/bin:$PATH PYTHONPATH={ROOT} RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
)
_LEND = (
    f"ln -sfn {VENV} ~/topwork/.venv && (grep -qs PYTHONPATH ~/.bashrc || "
    "echo 'export PYTHONPATH=$HOME/topwork' >> ~/.bashrc)"
)


class Operator:
    """An operator with a clone of the repository and the hosts' key."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._host: Host = network.start("operator")
        self._write("/root/.ssh/id_ed25519", network.key.read_text(), mode="600")
        keys = [{"key": KEY, "tenant": "test", "adapters": "*", "admin": True}]
        self._write("/root/keys.yaml", yaml.safe_dump(keys), mode="600")
        self._run("ray get-auth-token --generate > /dev/null")

    def write_cluster_file(self, head: str, workers: tuple[str, ...]) -> None:
        """Fill in the shipped file for hosts of these names."""
        content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray/onprem.yaml").read_text())
        content["provider"] |= {
            "head_ip": self._network.address(head),
            "worker_ips": [self._network.address(name) for name in workers],
        }
        content["auth"]["ssh_user"] = "root"
        node_type = content["available_node_types"]["local.cluster.node"]
        node_type["min_workers"] = node_type["max_workers"] = len(workers) + 1
        content["max_workers"] = len(workers) + 1
        content["file_mounts"][_KEY_FILE] = "/root/keys.yaml"
        for kind in ("head", "worker"):
            commands = content[f"{kind}_setup_commands"]
            installs = [one for one in commands if "pip install" in one or "-m venv" in one]
            assert len(installs) == {"head": 2, "worker": 3}[kind], installs
            others = [one for one in commands if one not in installs]
            content[f"{kind}_setup_commands"] = [_LEND, *others]
        self._write(_CLUSTER_FILE, yaml.safe_dump(content, width=1000))

    def ray_up(self) -> str:
        """Bring the cluster up."""
        return self._run(f"cd {ROOT} && ray up -y {_CLUSTER_FILE}", timeout=900)

    def join(self, name: str) -> None:
        """Add a host to the cluster, while the others go on."""
        address = self._network.address(name)
        self._run(f"cd {ROOT} && python -m deploy.ray.join {_CLUSTER_FILE} {address}", timeout=600)

    def ray_down(self) -> str:
        """Take the cluster down."""
        return self._run(f"ray down -y {_CLUSTER_FILE}", timeout=600)

    def on_the_head(self, command: str, timeout: float = 240.0) -> str:
        """Run a command on the head as an operator does, and return what it prints."""
        return self._run(f"ray exec {_CLUSTER_FILE} {_quoted(command)}", timeout=timeout)

    def deploy(self, **args: Any) -> None:
        """Deploy the shipped Serve config with these keys changed."""
        content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
        (application,) = content["applications"]
        application["args"] |= {"api_key_file": _KEY_FILE, **args}
        self._write("/root/serve.yaml", yaml.safe_dump(content))
        self._run(f"ray rsync-up {_CLUSTER_FILE} /root/serve.yaml '~/serve.yaml'")
        self.on_the_head("serve deploy ~/serve.yaml")

    def get(self, path: str) -> tuple[int, str]:
        """Return (status, body) of a route, asked of the head; 0 if nothing answers."""
        return self._curl(path)

    def complete(self, model: str, prompt: str, num_tokens: int = 16) -> tuple[int, str]:
        """Return (status, text), greedily, asked of the head."""
        body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        status, said = self._curl("/v1/completions", "-d", json.dumps(body))
        return status, json.loads(said)["choices"][0]["text"] if status == 200 else said

    def _curl(self, path: str, *arguments: str) -> tuple[int, str]:
        address = self._network.address("head")
        command = ["curl", "-s", "-m", "60", "-w", "\n%{http_code}"]
        command += ["-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
        asked = self._host.command(*command, *arguments, f"http://{address}:8000{path}")
        ran = subprocess.run(asked, capture_output=True, text=True)
        body, _, status = ran.stdout.rpartition("\n")
        return int(status), body

    def _run(self, command: str, timeout: float = 240.0) -> str:
        return self._host.run("bash", "-c", f"{_ENVIRONMENT}; {command}", timeout=timeout)

    def _write(self, path: str, text: str, mode: str = "644") -> None:
        command = f"cat > {path} && chmod {mode} {path}"
        subprocess.run(self._host.command("sh", "-c", command), input=text, text=True, check=True)


def _quoted(command: str) -> str:
    return "'" + command.replace("'", "'\\''") + "'"
