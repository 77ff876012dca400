"""Empties the node that it runs on, which is to go: `python -m deploy.ray.leave [SECONDS]`.

Ray hears that the node goes. Serve then starts elsewhere what it runs here, lets it hand its
streams over, and ends it. Owns asking for that and waiting until it is so; Ray itself is left to
whoever ends the node. A scheduler on another node whose ranks are here keeps them until then.
"""

import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
DEFAULT_SECONDS = 240.0
LEAST_SECONDS = 10.0  # until every load balancer has heard that nothing new belongs here
INTERVAL = 0.5
HEAD_PATIENCE = 10.0  # seconds without an answer until the head is taken for gone


@dataclass(frozen=True, slots=True)
class Raylet:
    """What the raylet of a node says of itself."""

    node_id: str
    gcs_address: str
    is_head: bool


def find_raylets() -> list[Raylet]:
    """Return the raylets of this machine; in a pod or on a host, there is one."""
    found = []
    for words in _command_lines():
        if Path(words[0]).name == "raylet":
            flags = dict(word.split("=", 1) for word in words if "=" in word)
            found.append(Raylet(flags["--node_id"], flags["--gcs-address"], "--head" in words))
    return found


def count_replicas() -> int:
    """Return how many of Serve's replicas run on this machine."""
    return sum(words[0].startswith("ray::ServeReplica") for words in _command_lines())


def _command_lines() -> list[list[str]]:
    lines = []
    for process in PROCESSES.iterdir():
        if process.name.isdecimal():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                lines.append((process / "cmdline").read_text(errors="replace").split("\0"))
    return lines


def announce(raylet: Raylet, seconds: float) -> str:
    """Tell Ray that a node will be gone in so many seconds; return what is wrong, or nothing."""
    command = [str(Path(sys.executable).with_name("ray")), "drain-node"]
    command += [f"--address={raylet.gcs_address}", f"--node-id={raylet.node_id}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=it is to go"]
    command += [f"--deadline-remaining-seconds={int(seconds)}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr or done.stdout).strip() if done.returncode else ""


def wait_until_empty(raylet: Raylet, seconds: float) -> str:
    """Wait until Serve runs nothing here; return what is left when time is over, or nothing."""
    began = last_answer = time.monotonic()
    while (left := count_replicas()) or time.monotonic() - began < LEAST_SECONDS:
        now = time.monotonic()
        if _answers(raylet.gcs_address):
            last_answer = now
        if now - last_answer > HEAD_PATIENCE:
            return f"{raylet.gcs_address}, the head, does not answer: {left} replicas stay"
        if now - began > seconds:
            return f"{left} replicas are left after {seconds:g} s"
        time.sleep(INTERVAL)
    return ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except OSError:
        return False


def leave(seconds: float) -> str:
    """Empty this node; return why that cannot be, or nothing."""
    raylets = find_raylets()
    if not raylets:
        return ""  # it has gone before
    if len(raylets) > 1:
        return f"{len(raylets)} raylets run here: `ray drain-node` takes the id of one"
    (raylet,) = raylets
    if raylet.is_head:
        return "this node is the head, which cannot leave its cluster"
    return announce(raylet, seconds) or wait_until_empty(raylet, seconds)


def main() -> None:
    """Empty this node and say what is wrong, if anything is."""
    if len(sys.argv) > 2:
        sys.exit("usage: python -m deploy.ray.leave [SECONDS]")
    sys.exit(leave(float(sys.argv[1]) if len(sys.argv) == 2 else DEFAULT_SECONDS) or 0)


if __name__ == "__main__":
    main()
