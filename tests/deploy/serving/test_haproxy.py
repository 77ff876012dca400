"""deploy.serving.haproxy: the settings with which Serve runs HAProxy."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.serving.haproxy import (
    MAX_DIRECTORY,
    alone_environment,
    cluster_environment,
    front_environment,
)
from tests.patience import PATIENCE

_CONFIGURATION = """\
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
listen stats
  bind *:8404
  stats enable
"""


def test_only_the_ports_of_statistics_are_kept_on_this_machine(tmp_path: Path) -> None:
    program = tmp_path / "haproxy program"
    program.write_text('#!/bin/sh\nfor argument; do echo "$argument"; done\n')
    program.chmod(0o755)
    environment = front_environment(tmp_path, str(program), 1)
    configuration = Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"])
    configuration.write_text(_CONFIGURATION)
    arguments = ["-db", "-f", str(configuration), "-sf", "1 2"]
    start = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([start, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == arguments
    kept = _CONFIGURATION.replace("bind :9101", "bind 127.0.0.1:9101")
    assert configuration.read_text() == kept.replace("bind *:8404", "bind 127.0.0.1:8404")


def test_two_servers_share_no_port_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = front_environment(tmp_path / "a", "haproxy", 1)
    two = front_environment(tmp_path / "b", "haproxy", 2)
    for name in one:
        if name.endswith(("_PORT", "_LOC", "Y_PATH", "SOCKET_PATH", "_BASE", "_FILE")):
            assert one[name] != two[name], name


def test_only_a_cluster_of_one_server_goes_without_what_a_dashboard_shows(tmp_path: Path) -> None:
    shared = front_environment(tmp_path, "haproxy", 1)
    assert not alone_environment().keys() & shared.keys()
    with TemporaryDirectory(prefix="tw-") as folder:
        everywhere = cluster_environment(Path(folder), "haproxy", None)
    assert not alone_environment().keys() & everywhere.keys()


def test_a_port_that_somebody_has_is_passed_over(tmp_path: Path) -> None:
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    taken = int(front_environment(tmp_path, "haproxy", 3)[name])
    with socket.create_server(("127.0.0.1", taken)):
        assert int(front_environment(tmp_path, "haproxy", 3)[name]) > taken


def test_others_cannot_replace_the_program_that_starts(tmp_path: Path) -> None:
    start = Path(front_environment(tmp_path, "haproxy", 1)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert os.stat(start).st_mode & 0o777 == 0o700


def test_a_start_made_where_one_was_made_before_still_starts_haproxy(tmp_path: Path) -> None:
    # A shell that evaluated `topwork environment` names the start as the program, and asks again.
    with TemporaryDirectory(prefix="tw-") as folder:
        program = "echo"
        for _ in range(3):
            environment = cluster_environment(Path(folder), program, None)
            program = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        done = subprocess.run([program, "here"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == "here\n"


def bound(host: str | None) -> list[str]:
    """Return what HAProxy's configuration binds when it went through the program that starts it."""
    with TemporaryDirectory(prefix="tw-") as folder:
        environment = cluster_environment(Path(folder), "true", host)
        configuration = Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"])
        configuration.write_text(_CONFIGURATION)
        start = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        subprocess.run([start, "-f", str(configuration)], check=True)
        lines = configuration.read_text().splitlines()
        return [line.split()[1] for line in lines if line.split()[0] == "bind"]


def test_on_a_cluster_haproxy_listens_where_it_was_asked_to() -> None:
    assert bound(None) == ["127.0.0.1:9101", "*:8000", "127.0.0.1:8404"]
    assert bound("10.0.0.7") == ["127.0.0.1:9101", "10.0.0.7:8000", "127.0.0.1:8404"]
    assert bound("[::1]") == ["127.0.0.1:9101", "[::1]:8000", "127.0.0.1:8404"]


def test_a_directory_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_DIRECTORY} letters"):
        cluster_environment(tmp_path / ("x" * MAX_DIRECTORY), "haproxy", None)


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
