"""Clients that others wrote, against a server that runs: `make test-clients`.

Installs each into an environment of its own, starts servers, and runs the tests of each client
with its own packages. `--only langchain,aiperf` takes some; other arguments reach pytest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.peers.environments import InstallError
from tests.clients.environments import ENVIRONMENTS, Environment, install
from tests.end_to_end.server import MODEL_DIR, ROOT, Server

HERE = Path(__file__).parent
NAMES = [environment.name for environment in ENVIRONMENTS]
# Nothing is asked of the internet, and nothing told to it.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


def make_model(parent: Path) -> Path:
    """Return the demo model with a chat template that tells it of tools."""
    directory = parent / "smollm2"
    directory.mkdir()
    for file in MODEL_DIR.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    template = directory / "chat_template.jinja"
    template.unlink()
    shutil.copy(HERE / "tool_template.jinja", template)
    return directory


@contextmanager
def serving(model_dir: Path, log: Path, *flags: str) -> Iterator[str]:
    """Serve a model and the demo adapters on two ranks; yields the address."""
    server = Server(log, "--model", str(model_dir), "--tp", "2", *flags)
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.stop()


def run_tests(environment: Environment, told: dict[str, str], arguments: list[str]) -> bool:
    """Run the tests of one environment; return whether all passed."""
    command = [str(environment.python), "-m", "pytest", "-o", "filterwarnings="]
    command += [str(HERE / environment.tests), *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **OFFLINE, **told}).returncode == 0


def run_all(chosen: list[Environment], arguments: list[str]) -> dict[str, str]:
    """Run the tests of these environments; return what became of each."""
    results: dict[str, str] = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model_dir = make_model(place)
        url = stack.enter_context(serving(model_dir, place / "bfloat16.txt"))
        told = {"TOPWORK_URL": url, "TOPWORK_MODEL_DIR": str(model_dir)}
        for environment in chosen:
            with ExitStack() as beside:
                if environment.name == "lm-eval":
                    log = place / "float32.txt"
                    exact = serving(model_dir, log, "--dtype", "float32")
                    told["TOPWORK_FLOAT32_URL"] = beside.enter_context(exact)
                passed = run_tests(environment, told, arguments)
                results[environment.name] = "passed" if passed else "failed"
    return results


def main() -> None:
    """Install, serve, run, and tell of each client."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--install-only", action="store_true", help="run nothing")
    known, arguments = parser.parse_known_args()
    names = known.only.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    chosen, faults = [], {}
    for environment in ENVIRONMENTS:
        if environment.name in names:
            try:
                install(environment, print)
                chosen.append(environment)
            except InstallError as error:
                faults[environment.name] = f"cannot be installed: {error}"
    results = {} if known.install_only else run_all(chosen, arguments)
    for name, result in {**results, **faults}.items():
        print(f"{name}: {result}")
    sys.exit(bool(faults) or any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    main()
