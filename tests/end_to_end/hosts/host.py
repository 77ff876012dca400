"""Hosts that are namespaces of this machine: each has its own network, processes, files and sshd.

Owns how one is made, reached and lost. To a program inside it is a machine with an address; to this
machine it is a tree of processes that end with its first.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside.sh"
_START_SECONDS = 20.0
PROGRAMS = ("ip", "setpriv", "unshare", "nsenter", "rsync", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def why_there_can_be_none() -> str | None:
    """Return what this machine lacks, None if hosts can be made."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which only root can make"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install openssh-server rsync iproute2"
    if any(Path(used).is_relative_to("/tmp") for used in (__file__, sys.executable)):
        return "each host has a /tmp of its own, and this clone or its packages lie there"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.decode().strip()}"


class Host:
    """One host, which runs from when it is made until it is lost."""

    def __init__(self, namespace: str, name: str, address: str, directory: Path) -> None:
        """Start a host in a network namespace that is there already.

        Args:
            namespace: of its network.
            name: of the host.
            address: that it has in this network.
            directory: empty; `hosts`, `authorized_keys` and the folder `shared` lie beside it.
        """
        self.name = name
        self.address = address
        self._log = directory.with_suffix(".log")
        beside = directory.parent
        command = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace]
        command += ["unshare", "-m", "-p", "-f", "-u", "-i", "--kill-child"]
        command += ["sh", str(_INSIDE), str(directory), name]
        command += [str(beside / "hosts"), str(beside / "authorized_keys")]
        with self._log.open("w") as log:
            self._outer = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._first = self._wait_for_sshd()

    def _wait_for_sshd(self) -> int:
        """Return the pid of the host's first process, once it is sshd and listens."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            assert self._outer.poll() is None, f"{self.name} ended:\n{self._log.read_text()}"
            if "Server listening on" in self._log.read_text():
                return _only_child(self._outer.pid)
            time.sleep(0.05)
        raise AssertionError(f"{self.name} has no sshd:\n{self._log.read_text()}")

    def command(self, *command: str, home: str = "/root") -> list[str]:
        """Return what runs a command inside, as root."""
        enter = ["nsenter", "--target", str(self._first), "-m", "-u", "-i", "-n", "-p", "--root"]
        clean = [
            "env",
            "-i",
            "-C",
            home,
            f"HOME={home}",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "TERM=dumb",
        ]
        return [*enter, *clean, *command]

    def run(self, *command: str, timeout: float = 120.0) -> str:
        """Run a command inside and return what it prints.

        Raises:
            AssertionError: with all that it printed, if it fails.
        """
        ran = subprocess.run(
            self.command(*command), capture_output=True, text=True, timeout=timeout
        )
        said = f"{' '.join(command)} on {self.name}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        assert ran.returncode == 0, said
        return ran.stdout

    def processes(self) -> list[str]:
        """Return the command lines of what runs inside besides sshd."""
        lines = self.run("ps", "-eo", "pid=,stat=,args=").splitlines()
        fields = [line.split(None, 2) for line in lines]
        return [
            args
            for pid, stat, args in fields
            if pid != "1" and not stat.startswith("Z") and args != "ps -eo pid=,stat=,args="
        ]

    def lose(self) -> None:
        """End it as a power cut does: every process inside is killed."""
        os.kill(self._first, signal.SIGKILL)
        self._outer.wait(30)

    @property
    def is_there(self) -> bool:
        """Whether it has not been lost."""
        return self._outer.poll() is None


def _only_child(pid: int) -> int:
    """Return the pid of a process's one child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, f"{pid} has the children {children}"
    return int(children[0])


def ip(*arguments: str) -> None:
    """Run `ip`."""
    _checked(["ip", *arguments])


def _checked(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
