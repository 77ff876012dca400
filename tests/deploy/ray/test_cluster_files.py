"""The cluster files are ones that this Ray takes, and keep clear of its traps."""

import json
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deploy.serving.haproxy.environment import cluster_environment, local_ray_environment
from deploy.serving.haproxy.front_door import FrontDoor

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "deploy" / "ray" / f"{name}.yaml" for name in ("onprem", "aws", "gcp")]
IN_THE_VENV = "~/topwork/.venv/bin/"

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content


def starts(content: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words of the one `ray start` of the head, and of workers."""

    def words(key: str) -> list[str]:
        (found,) = [command for command in content[key] if "ray start" in command]
        return shlex.split(found.partition(f"{IN_THE_VENV}ray start")[2])

    return words("head_start_ray_commands"), words("worker_start_ray_commands")


@every_file
def test_a_cluster_file_is_one_of_rays_schema(file: Path) -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(read(file), schema)
    validate_config(prepare_config(read(file)))


@every_file
def test_ray_finds_all_that_it_needs_in_a_cluster_file(file: Path) -> None:
    """For `type: local` it adds nothing by itself once there is a block of node types."""
    prepared = prepare_config(read(file))
    for kind in ("head", "worker"):
        said = "\n".join(prepared[f"{kind}_setup_commands"])
        assert "topwork environment >" in said
        assert "~/.bashrc" in said, "`ray down` says `ray stop`, wherever that is"
    assert prepared["head_node_type"] in prepared["available_node_types"]
    for key in ("docker", "initialization_commands", "cluster_synced_files", "rsync_filter"):
        assert key in prepared


def test_on_prem_there_is_room_for_the_head_among_the_nodes() -> None:
    """Ray's autoscaler counts it as one of them, and would not start the last worker."""
    content = read(FILES[0])
    node_type = content["available_node_types"]["local.cluster.node"]
    count = len(content["provider"]["worker_ips"]) + 1
    assert node_type["min_workers"] == node_type["max_workers"] == content["max_workers"] == count


@every_file
def test_every_flag_is_one_of_ray_start(file: Path) -> None:
    known = {
        name
        for parameter in import_module("ray.scripts.scripts").start.params
        for name in parameter.opts
    }
    for words in starts(read(file)):
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert flags <= known


@every_file
def test_the_head_gives_no_cores_and_shows_its_dashboard_to_itself_alone(file: Path) -> None:
    head, worker = starts(read(file))
    assert {"--num-cpus=0", "--num-gpus=0", "--dashboard-host=127.0.0.1"} <= set(head)
    assert "--address=$RAY_HEAD_IP:6379" in worker


@every_file
def test_all_hosts_have_one_token_and_the_same_code(file: Path) -> None:
    content = read(file)
    mounts = content["file_mounts"]
    assert mounts == {"~/.ray/auth_token": "~/.ray/auth_token", "~/topwork": "."}
    assert {".git", ".venv"} <= set(content["rsync_exclude"])


@every_file
def test_every_program_is_told_by_its_path(file: Path) -> None:
    """Commands run in a login shell, in which another Python or Ray may come first."""
    content = read(file)
    for key in ("head", "worker"):
        commands = content[f"{key}_setup_commands"] + content[f"{key}_start_ray_commands"]
        for command in commands:
            assert not re.search(r"(^|[;&(]\s*)(ray|pip|topwork|serve) ", command), command


@every_file
def test_no_host_starts_ray_without_its_environment(file: Path) -> None:
    content = read(file)
    for key in ("head", "worker"):
        (command,) = [c for c in content[f"{key}_start_ray_commands"] if "ray start" in c]
        assert re.match(r"\. ~/\.topwork/environment &&", command), command


@every_file
def test_commands_are_ones_that_a_shell_can_read(file: Path) -> None:
    content = read(file)
    commands = [
        command for key, value in content.items() if key.endswith("_commands") for command in value
    ]
    assert len(commands) >= 10
    for command in commands:
        read_only = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert read_only.returncode == 0, f"{command}: {read_only.stderr}"


def test_every_setting_of_the_environment_is_one_that_this_ray_reads() -> None:
    """Ray would ignore what it does not know, and HTTP would go another way without a word."""
    package = Path(ray.__file__).parent
    places = [
        *(package / "serve" / "_private").glob("*.py"),
        *(package / "_private").glob("**/*.py"),
        *(package / "_common").glob("**/*.py"),
        *(package / "dashboard").glob("**/*.py"),
    ]
    places += [
        package / "core" / "src" / "ray" / name for name in ("raylet/raylet", "gcs/gcs_server")
    ]
    known = b"\n".join(place.read_bytes() for place in places)
    with TemporaryDirectory() as directory:  # its path must be short
        named = cluster_environment(Path(directory), "/usr/sbin/haproxy", FrontDoor())
    named |= local_ray_environment()
    assert len(named) > 10
    for name in named:
        assert name.encode() in known or name.removeprefix("RAY_").encode() in known, name


@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.stem)
def test_in_a_cloud_only_workers_have_gpus(file: Path) -> None:
    types = read(file)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["gpu_worker"]["resources"]["GPU"] >= 1
    assert types["gpu_worker"]["min_workers"] <= types["gpu_worker"]["max_workers"]
