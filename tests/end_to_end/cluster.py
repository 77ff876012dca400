"""A Ray head on loopback and the application on it, driven as an operator drives them."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import yaml

from tests.end_to_end.asking import Endpoint, wait_for
from tests.end_to_end.processes import program, title
from tests.end_to_end.server import MODEL_DIR, ROOT
from tests.patience import PATIENCE
from tests.ports import free_port

BIN = Path(sys.executable).parent


class Cluster(Endpoint):
    """`ray start --head` in processes of its own; everything listens on loopback."""

    def __init__(self, num_cpus: int) -> None:
        self.folder = folder = Path(mkdtemp(prefix="tw-"))  # paths of sockets must be short
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.dashboard = free_port()
        self.log = folder / "head.txt"
        self.environment = self._make_environment()
        self._nodes: list[subprocess.Popen[bytes]] = []  # beside the head
        self._gcs = f"127.0.0.1:{free_port()}"
        command = [
            *(str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"),
            *(f"--port={self._gcs.rpartition(':')[2]}", "--dashboard-host=127.0.0.1"),
            *(f"--dashboard-port={self.dashboard}", f"--temp-dir={folder}"),
            *(f"--num-cpus={num_cpus}", "--object-store-memory=1000000000"),
        ]
        self.process = self._start(command, self.log)
        self.wait_for(lambda: "Ray runtime started" in self.log.read_text())

    def _start(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def add_node(self, num_cpus: int) -> tuple[str, int]:
        """Start one more raylet on this machine; return its node id and the pid of the raylet."""
        before = self._raylets()
        log = self.folder / f"node-{len(before)}.txt"
        command = [
            *(str(BIN / "ray"), "start", "--block", f"--address={self._gcs}"),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}"),
            "--object-store-memory=200000000",
        ]
        process = self._start(command, log)
        self._nodes.append(process)

        def is_there() -> bool:
            assert process.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        self.wait_for(is_there)
        (node,) = self._raylets().items() - before.items()
        return node

    def _raylets(self) -> dict[str, int]:
        """Return the pids of all raylets by the ids of their nodes."""
        found: dict[str, int] = {}
        for pid in self.family():
            if program(pid) == "raylet":
                found[title(pid).partition("--node_id=")[2].split()[0]] = pid
        return found

    def _make_environment(self) -> dict[str, str]:
        command = [sys.executable, "-m", "deploy.cli", "environment", "--directory"]
        base = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": ""}
        done = subprocess.run(
            [*command, str(self.folder / "haproxy")],
            env=base,
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [line.removeprefix("export ") for line in done.stdout.splitlines()]
        printed = {name: shlex.split(value)[0] for name, value in (x.split("=", 1) for x in lines)}
        # Others on this machine may have the ports that are documented for statistics.
        ports = {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        return base | printed | ports | {"RAY_AUTH_TOKEN": "of a test, and of nobody else: 0123456"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of the commands beside this Python."""
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def deploy(self, **arguments: Any) -> None:
        """`serve deploy` of a configuration whose `args` are these."""
        default = {"model": str(MODEL_DIR), "served_model_name": "smollm2", "routers": 1}
        arguments = default | arguments
        document = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                {
                    "name": "topwork",
                    "route_prefix": "/",
                    "import_path": "deploy.serving.app:build",
                    "args": arguments,
                }
            ],
        }
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(document))
        done = self.run("serve", "deploy", str(file), "-a", f"http://127.0.0.1:{self.dashboard}")
        assert done.returncode == 0, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """Return what `serve status` tells of the application."""
        done = self.run("serve", "status", "-a", f"http://127.0.0.1:{self.dashboard}")
        assert done.returncode == 0, done.stdout + done.stderr
        told: dict[str, Any] = yaml.safe_load(done.stdout)["applications"]["topwork"]
        return told

    def is_running(self) -> bool:
        """Tell whether the last configuration is what runs, as `serve status` says."""
        told = self.status()
        assert told["status"] != "DEPLOY_FAILED", told["message"]
        states = [one["status"] for one in told["deployments"].values()]
        return bool(told["status"] == "RUNNING" and states == ["HEALTHY"] * 3)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while the cluster runs."""

        def is_so() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return holds()

        wait_for(is_so, self.tails)

    def is_ready(self) -> bool:
        """Tell whether requests are served."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def replicas(self, deployment: str) -> dict[str, int]:
        """Return the pids of a deployment's replicas, by process title."""
        found: dict[str, int] = {}
        for pid in self.family():
            name = title(pid)
            if name.startswith(f"ray::ServeReplica:topwork:{deployment}"):
                found[f"{name} {pid}"] = pid
        return found

    def pids(self, start: str) -> set[int]:
        """Return the pids whose title starts so."""
        return {pid for pid in self.family() if title(pid).startswith(start)}

    def family(self) -> set[int]:
        """Return the pids of all processes of this cluster: they know its folder."""
        mark = str(self.folder).encode()
        return {
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and int(entry.name) != os.getpid() and _knows(entry, mark)
        }

    def tails(self) -> str:
        """Return the ends of the logs, for whoever reads why a test failed."""
        files = sorted(self.folder.glob("session_latest/logs/serve/*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-1500:]}" for file in files)

    def stop(self) -> None:
        """End the cluster as Ctrl-C does, and make sure that nothing is left."""
        for process in (*self._nodes, self.process):
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
        gate = threading.Event()
        for _ in range(150):
            if not self.family():
                break
            gate.wait(0.2)
        left = {pid: title(pid) for pid in self.family()}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder)
        assert not left, f"processes left over: {left}"


def _knows(entry: Path, mark: bytes) -> bool:
    try:
        return mark in (entry / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


class Load:
    """Clients that ask one request after the other until told to stop; every failure is kept."""

    def __init__(self, url: str, models: list[str], clients: int, max_tokens: int = 24) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._url = url
        self._max_tokens = max_tokens
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, models[number % len(models)]))
            for number in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, model: str) -> None:
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            body = {
                "model": model,
                "prompt": f"client {number} asks for the {turn}th time",
                "max_tokens": self._max_tokens,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            }
            try:
                # A connection for each request: the hardest case for whoever comes and goes.
                reply = httpx.post(f"{self._url}/v1/completions", json=body, timeout=PATIENCE)
            except httpx.HTTPError as error:
                self.failures.append(f"{number}: {error!r}")
                continue
            if reply.status_code != 200 or _broken(reply.text, stream=number % 2 == 0):
                self.failures.append(f"{number}: {reply.status_code} {reply.text[-300:]}")
            else:
                self.num_answers += 1


def _broken(text: str, *, stream: bool) -> bool:
    if not stream:
        return json.loads(text)["choices"][0]["finish_reason"] != "length"
    return not text.rstrip().endswith("data: [DONE]") or '"error"' in text
