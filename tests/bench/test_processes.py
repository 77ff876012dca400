"""Real processes are paused with all that they started, and a child answers workloads."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

import kernels.linear  # noqa: F401
from deploy.bench.child import ChildError, ChildTarget, inherited_environment
from deploy.bench.http_target import BenchError, token_times
from deploy.bench.workload import Ask, Workload
from tests.bench.peers.servers import LlamaDialect
from tests.bench.peers.target import wait_until_healthy
from tests.bench.process_tree import ProcessTree

# A shell whose children are one in its session, one in a session of its own, and one that has
# lost its parent.
FAMILY = "sleep 600 & setsid sleep 600 & (sleep 600 &); wait"


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    process = subprocess.Popen(["sh", "-c", FAMILY], start_new_session=True)
    tree = ProcessTree(process.pid)
    until(lambda: len(tree.pids()) == 4)
    yield tree
    tree.kill()
    process.wait()


def test_a_peer_inherits_no_limit_that_we_set_for_ourselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "ONEDNN_MAX_CPU_ISA" in os.environ  # of kernels.linear
    assert "PYTHONPATH" not in inherited_environment()
    assert inherited_environment()["HF_HUB_OFFLINE"] == "1"
    assert "ONEDNN_MAX_CPU_ISA" not in inherited_environment()


def until(is_met: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_met():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def states(tree: ProcessTree) -> set[str]:
    return {
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in tree.pids()
    }


def test_a_pause_stops_children_in_other_sessions_and_those_without_a_parent(
    tree: ProcessTree,
) -> None:
    with tree.paused():
        until(lambda: states(tree) == {"T"})
        with tree.awake():
            until(lambda: states(tree) == {"S"})
        until(lambda: states(tree) == {"T"})
    until(lambda: states(tree) == {"S"})


def test_all_of_a_paused_tree_can_be_ended(tree: ProcessTree) -> None:
    tree.pause()
    pids = tree.pids()
    tree.kill()
    until(lambda: all(not Path(f"/proc/{pid}/exe").exists() for pid in pids))


def test_memory_is_that_of_all_processes(tree: ProcessTree) -> None:
    alone = sum(ProcessTree(pid).memory_bytes() for pid in sorted(tree.pids())[1:])
    assert 0 < alone < tree.memory_bytes() < 2**26


def test_nothing_is_left_of_a_process_that_has_ended() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    tree = ProcessTree(process.pid)
    tree.pause()
    assert (tree.pids(), tree.memory_bytes(), tree.cpu_seconds()) == (set(), 0, {})


ECHO = """
from deploy.bench.child import serve_target
from deploy.bench.workload import Run, Sample

class Echo:
    def __init__(self, offset):
        self.offset = offset
    def run(self, workload, round_number):
        print("noise on standard output")
        import sys
        assert not any(path == ROOT for path in sys.path), sys.path
        return Run(tuple(Sample(self.offset, (float(len(a.token_ids)), float(round_number)))
                         for a in workload.asks(round_number)))

def serve():
    serve_target(Echo)
"""
LOAD = Workload(name="w", models=("m",), concurrency=1, num_requests=2, input_len=5, output_len=2)


def echo(tmp_path: Path, text: str) -> ChildTarget:
    (tmp_path / "echo_target.py").write_text(text)
    # Another name of our Python, so that the child takes it for another one.
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    environment = {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    return ChildTarget(
        "echo", "echo_target", {"offset": 3.5}, python=str(python), environment=environment, log=log
    )


def test_a_child_of_another_python_answers_and_finds_our_folders_no_more(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    child = echo(tmp_path, f"ROOT = {root!r}\n{ECHO}")
    try:
        run = child.run(LOAD, 7)
        assert [(s.sent, s.token_times) for s in run.samples] == [(3.5, (5.0, 7.0))] * 2
    finally:
        child.close()
    assert "noise" in (tmp_path / "log").read_text()


def test_a_child_that_dies_is_told_and_its_log_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="echo died"):
        echo(tmp_path, "def serve():\n    raise SystemExit('no memory')\n")
    assert "no memory" in (tmp_path / "log").read_text()


def test_a_server_that_ends_or_never_gets_healthy_is_told() -> None:
    with pytest.raises(BenchError, match="vllm has ended"):
        wait_until_healthy("vllm", "http://127.0.0.1:9/health", 5.0, lambda: False)
    with pytest.raises(BenchError, match="vllm is not healthy after 0 s: .*refused"):
        wait_until_healthy("vllm", "http://127.0.0.1:9/health", 0.0, lambda: True)


async def test_llama_is_asked_for_an_adapter_by_number_and_its_count_of_tokens_is_believed() -> (
    None
):
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        # Half a character is told with its other half, and the last chunk counts nothing anew.
        counts = (1, 3, 3)

        async def events() -> AsyncIterator[bytes]:
            for count in counts:
                yield f'data: {{"tokens_predicted": {count}}}\n\n'.encode()

        return httpx.Response(200, content=events())

    llama = LlamaDialect(("x", "y"))
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
        times = [at async for at in token_times(client, Ask("y", (7, 8), 3), llama)]
        [at async for at in token_times(client, Ask("base", (7, 8), 3), llama)]
    assert len(times) == 3
    assert b'"lora":[{"id":1,"scale":1.0}]' in bodies[0] and b'"prompt":[7,8]' in bodies[0]
    assert b"lora" not in bodies[1]


async def test_an_error_of_llama_is_told() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(500, text="no slot"))
    async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
        with pytest.raises(BenchError, match="500: no slot"):
            [at async for at in token_times(client, Ask("base", (1,), 1), LlamaDialect(()))]
