"""Where peers are kept, and the commands that put them there.

Owns the directory, its virtual environments and the logs of what was run.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

PEERS_DIR = Path.home() / ".cache" / "topwork" / "peers"
DOWNLOADS = PEERS_DIR / "downloads"
TORCH = "torch==2.13.0"  # first and pinned, as for ourselves: the CPU's
_QUIET = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class InstallError(Exception):
    """A peer cannot be installed; the message says what failed, and how."""


def run_logged(log: Path, *command: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output at the end of a file.

    Raises:
        InstallError: if it fails, with the end of what it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shown = shlex.join(map(str, command))
    with log.open("a") as output:
        output.write(f"$ {shown}\n")
        output.flush()
        try:
            code = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_QUIET, **(environment or {})},
            ).returncode
        except FileNotFoundError as error:
            raise InstallError(f"cannot run {command[0]}: {error.strerror}") from error
    if code != 0:
        raise InstallError(f"{shown} ended with {code}; {log} ends:\n{log_tail(log)}")


def log_tail(log: Path, num_lines: int = 25) -> str:
    """Return the last lines of a file."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-num_lines:])


def make_environment(directory: Path, log: Path) -> Path:
    """Make a virtual environment with torch, if it is not there; return its Python."""
    python = directory / "bin" / "python"
    if not python.exists():
        run_logged(log, sys.executable, "-m", "venv", directory)
    run_logged(log, python, "-m", "pip", "install", TORCH)
    return python


def is_marked(directory: Path, version: str) -> bool:
    """Tell whether this version was installed to its end."""
    marker = directory / ".installed"
    return marker.is_file() and marker.read_text() == version


def mark(directory: Path, version: str) -> None:
    """Note that this version is installed."""
    (directory / ".installed").write_text(version)
