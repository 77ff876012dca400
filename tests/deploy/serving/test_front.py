"""deploy.serving.front: the settings with which Serve runs HAProxy."""

import os
import subprocess
from pathlib import Path

from deploy.serving.front import front_environment

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
    environment = front_environment(tmp_path, str(program))
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
    one = front_environment(tmp_path / "a", "haproxy")
    two = front_environment(tmp_path / "b", "haproxy")
    for name in one:
        if name.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE")):
            assert one[name] != two[name], name


def test_others_cannot_replace_the_program_that_starts(tmp_path: Path) -> None:
    start = Path(front_environment(tmp_path, "haproxy")["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert os.stat(start).st_mode & 0o777 == 0o700
