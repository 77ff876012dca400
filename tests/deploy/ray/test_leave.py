"""deploy.ray.leave: what it finds on its node, and when it waits no longer. tests/end_to_end/
test_host_leaves.py has the whole of it."""

import socket
from pathlib import Path

import pytest

from deploy.ray import leave
from deploy.ray.leave import Raylet, find_raylets, wait_until_empty

RAYLET = ["/opt/ray/raylet", "--node_id=abc", "--x=a=b", "--gcs-address=10.0.0.1:6379"]


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes of a node: `add` makes one."""
    monkeypatch.setattr(leave, "PROCESSES", tmp_path)
    monkeypatch.setattr(leave, "LEAST_SECONDS", 0.0)
    (tmp_path / "meminfo").touch()
    return tmp_path


def add(processes: Path, pid: int, *words: str) -> Path:
    (processes / str(pid)).mkdir()
    file = processes / str(pid) / "cmdline"
    file.write_text("\0".join(words) + "\0")
    return file


def test_the_raylet_says_which_node_this_is(processes: Path) -> None:
    add(processes, 1, "python3", "--node_id=of an agent")
    add(processes, 2, *RAYLET)
    assert find_raylets() == [Raylet("abc", "10.0.0.1:6379", is_head=False)]


def test_there_is_nothing_to_do_where_no_raylet_runs(processes: Path) -> None:
    assert leave.leave(1) == ""


def test_the_head_cannot_leave(processes: Path) -> None:
    add(processes, 2, *RAYLET, "--head")
    assert "is the head" in leave.leave(1)


def test_which_of_several_nodes_is_to_go_must_be_said(processes: Path) -> None:
    add(processes, 2, *RAYLET)
    add(processes, 3, *RAYLET)
    assert "2 raylets" in leave.leave(1)


def test_a_head_that_cannot_be_reached_is_told(processes: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"--gcs-address=127.0.0.1:{port}"
    add(processes, 2, *RAYLET[:-1], address)
    assert leave.leave(1) != ""


def test_it_waits_for_replicas_and_for_nothing_else(processes: Path) -> None:
    replica = add(processes, 4, "ray::ServeReplica:topwork:Router")
    add(processes, 5, "ray::WorkerActor")
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        node = Raylet("abc", f"127.0.0.1:{gcs.getsockname()[1]}", is_head=False)
        assert wait_until_empty(node, 0.0) == "1 replicas are left after 0 s"
        replica.unlink()
        assert wait_until_empty(node, 0.0) == ""


def test_it_waits_no_longer_when_the_head_has_gone(
    processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave, "HEAD_PATIENCE", 0.2)
    add(processes, 4, "ray::ServeReplica:topwork:Router")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = wait_until_empty(Raylet("abc", f"127.0.0.1:{port}", is_head=False), 60)
    assert "does not answer: 1 replicas stay" in told
