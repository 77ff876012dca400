"""deploy.serving.lifecycle: how a server ends, and that nothing of it is left; without Ray."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.serving.lifecycle.leftovers import end_started, started_processes
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE, SOON

# Starts what Ray does: processes that begin a session of their own, that hide their environment,
# and whose parent has died.
_SERVER = """
import os, subprocess, sys, time
from deploy.serving.lifecycle.leftovers import MARK
from deploy.serving.lifecycle.supervisor import supervise

mark, is_ready, owns_cluster, seconds = sys.argv[1], *map(float, sys.argv[2:])
os.environ[MARK] = mark
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
orphan = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:]); os._exit(0)"

def run(orders):
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.Popen(sleep, env={}, process_group=0)
    subprocess.run([sys.executable, "-c", orphan, *sleep])
    print("server", os.getpid(), flush=True)
    if is_ready:
        orders.tell_ready()
    time.sleep(0.2)
    print("up", flush=True)
    orders.stop.wait()
    print("drains" if orders.drains else "ends", flush=True)
    time.sleep(seconds)
    return 0

print("code", supervise(run, mark=mark, owns_cluster=bool(owns_cluster), patience=3.0, say=print))
"""


class Running:
    """A supervised server."""

    def __init__(self, folder: Path, is_ready: bool, owns_cluster: bool, seconds: float) -> None:
        self.mark = folder / "mark"
        self.mark.mkdir()
        flags = [str(float(flag)) for flag in (is_ready, owns_cluster, seconds)]
        self._log = folder / "log.txt"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(self.mark), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(lambda: "up" in self.said(), self.said)
        self.server = int(self.said().split()[1])
        assert len(self.left()) == 4, "the server and what it has started"

    def said(self) -> str:
        return self._log.read_text()

    def left(self) -> set[int]:
        return started_processes(str(self.mark), self.server)

    def wait(self) -> list[str]:
        """Return what it has said when it has ended."""
        self.process.wait(PATIENCE)
        return self.said().splitlines()[2:]


@contextmanager
def running(
    folder: Path, *, is_ready: bool = True, owns_cluster: bool = True, seconds: float = 0
) -> Iterator[Running]:
    one = Running(folder, is_ready, owns_cluster, seconds)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(PATIENCE)
        end_started(str(one.mark), one.server)


@pytest.mark.parametrize(
    ("number", "order"),
    [(signal.SIGTERM, "drains"), (signal.SIGINT, "ends"), (signal.SIGHUP, "ends")],
)
def test_a_ready_server_is_told_to_end(tmp_path: Path, number: int, order: str) -> None:
    with running(tmp_path) as server:
        os.kill(server.process.pid, number)
        assert server.wait() == [order, "code 0"]
        assert not server.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_start_ends_at_once(tmp_path: Path, number: int) -> None:
    with running(tmp_path, is_ready=False) as server:
        os.kill(server.process.pid, number)
        assert server.wait() == ["code 0"]
        assert not server.left()


def test_a_start_on_a_cluster_of_others_is_told_to_end(tmp_path: Path) -> None:
    with running(tmp_path, is_ready=False, owns_cluster=False) as server:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == ["drains", "code 0"]


def test_a_second_signal_ends_everything_at_once_and_an_echo_of_the_first_does_not(
    tmp_path: Path,
) -> None:
    with running(tmp_path, seconds=2) as server:
        os.kill(server.process.pid, signal.SIGINT)
        time.sleep(0.1)  # a wrapper sends it on to whom the terminal has sent it, too
        os.kill(server.process.pid, signal.SIGINT)
        time.sleep(0.1)
        assert server.process.poll() is None
        time.sleep(0.6)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == ["ends", f"code {128 + signal.SIGTERM}"]
        assert not server.left()


def test_a_server_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, seconds=600) as server:
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.wait() == [
            "drains",
            "the server did not end within 3 s: it was killed",
            "code 1",
        ]
        assert not server.left()


def test_nothing_is_left_of_a_server_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        os.kill(server.server, signal.SIGKILL)
        said = [f"the server's process {server.server} was ended by SIGKILL", "code 1"]
        assert server.wait() == said
        assert not server.left()


@pytest.mark.parametrize("is_ready", [True, False])
def test_nothing_is_left_when_the_process_that_was_started_is_killed(
    tmp_path: Path, is_ready: bool
) -> None:
    with running(tmp_path, is_ready=is_ready) as server:
        os.kill(server.process.pid, signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: not server.left())
        assert time.monotonic() - began < SOON
        assert not server.mark.exists(), "its files are gone, too"


def test_a_halted_server_ends_when_it_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        os.kill(server.process.pid, signal.SIGCONT)
        assert server.wait() == ["drains", "code 0"]


@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_python_imports_ends_it_with_code_0(after: float, number: int) -> None:
    # Its own first line says that the interpreter is up: before, no program could have its say.
    script = (
        "import sys; sys.argv[1:] = ['serve', '--model', 'none']; print('up', flush=True); "
        "import deploy.serving.lifecycle.early_signals; print('armed', flush=True); "
        "import deploy.cli.commands, time; time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.stdout.readline() == "armed\n"
        time.sleep(after)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0


def test_nohup_is_left_as_it_is() -> None:
    script = (
        "import signal, sys; sys.argv[1:] = ['serve']; "
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "import deploy.serving.lifecycle.early_signals; "
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_other_commands_have_the_signals_that_python_gives_them() -> None:
    script = (
        "import signal, sys; sys.argv[1:] = ['check']; import deploy.cli.commands; "
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
