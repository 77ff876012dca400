"""Where clients are installed: each beside those that it gets on with, once.

Owns the versions. Nothing of a client comes near our own environment, and each runs with the
packages that it asks for itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peers.environments import TORCH, is_marked, mark, run_logged
from tests.bench.peers.install import VLLM_BINARIES, Peer
from tests.bench.peers.install import install as install_peer

CLIENTS_DIR = Path.home() / ".cache" / "topwork" / "clients"
FOR_TESTS = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "hypothesis==6.170.15", "httpx==0.28.1")


@dataclass(frozen=True)
class Environment:
    """Packages that are installed together."""

    name: str
    packages: tuple[str, ...]
    tests: str  # the file that is run with them
    is_imported: bool  # by the tests, which then run in it; else they run its commands
    needs_torch: bool = False  # first and pinned, so that no build for GPUs comes

    @property
    def directory(self) -> Path:
        return VLLM_BINARIES.parent if self.name == "vllm" else CLIENTS_DIR / self.name

    @property
    def python(self) -> Path:
        """The Python that runs the tests."""
        return self.binary("python") if self.is_imported else Path(sys.executable)

    def binary(self, name: str) -> Path:
        return self.directory / "bin" / name


ENVIRONMENTS = (
    Environment(
        "langchain",
        ("langchain-openai==1.6.6", "langchain-anthropic==1.7.4", "langchain-core==1.6.5"),
        "test_langchain.py",
        is_imported=True,
    ),
    Environment("litellm", ("litellm==1.100.0",), "test_litellm.py", is_imported=True),
    Environment(
        "agents",
        ("openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0"),
        "test_agents.py",
        is_imported=True,
    ),
    Environment("instructor", ("instructor==1.17.0",), "test_instructor.py", is_imported=True),
    Environment(
        "lm-eval",
        ("lm-eval[api,hf]==0.4.13", "peft==0.21.0"),
        "test_lm_eval.py",
        is_imported=True,
        needs_torch=True,
    ),
    Environment(
        "guidellm", ("guidellm==0.8.1",), "test_guidellm.py", is_imported=False, needs_torch=True
    ),
    Environment("aiperf", ("aiperf==0.13.0",), "test_aiperf.py", is_imported=False),
    Environment(
        "vllm", (), "test_vllm_bench.py", is_imported=False
    ),  # as `make bench-peers` has it
)


def install(environment: Environment, told: Callable[[str], None]) -> None:
    """Install an environment if it is not there.

    Raises:
        InstallError: with the command that failed and the end of what it said.
    """
    if environment.name == "vllm":
        install_peer(Peer.VLLM, told)
        return
    packages = environment.packages + (FOR_TESTS if environment.is_imported else ())
    version, log = " ".join(packages), CLIENTS_DIR / f"{environment.name}.log"
    if is_marked(environment.directory, version):
        return
    told(f"installing {version} into {environment.directory}; log: {log}")
    python = environment.binary("python")
    if not python.exists():
        run_logged(log, sys.executable, "-m", "venv", environment.directory)
    if environment.needs_torch:
        run_logged(log, python, "-m", "pip", "install", TORCH)
    run_logged(log, python, "-m", "pip", "install", *packages)
    mark(environment.directory, version)
