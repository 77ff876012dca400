"""A host that joins later gets what the others got, in the same order."""

from pathlib import Path

import pytest
import yaml

from deploy.ray.join import main, steps

ONPREM = Path(__file__).parents[3] / "deploy" / "ray" / "onprem.yaml"
CLUSTER = {
    "provider": {"type": "local", "head_ip": "192.0.2.10"},
    "auth": {"ssh_user": "ubuntu", "ssh_private_key": "/keys/one"},
    "file_mounts": {"~/.ray/auth_token": "/home/me/token", "/opt/app": "."},
    "rsync_exclude": [".git"],
    "worker_setup_commands": ["echo 'set up'"],
    "worker_start_ray_commands": ["ray stop", "ray start --address=$RAY_HEAD_IP:6379"],
}
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-i", "/keys/one"]
THERE = "ubuntu@192.0.2.13"


def test_files_come_first_then_set_up_then_the_start() -> None:
    *copies, set_up, stop, start = steps(CLUSTER, "192.0.2.13")
    rsync = ["rsync", "-a", "-e", " ".join(SSH), "--exclude=.git"]
    assert copies == [
        [*SSH, THERE, "mkdir -p .ray"],
        [*rsync, "/home/me/token", f"{THERE}:.ray/auth_token"],
        [*SSH, THERE, "mkdir -p /opt"],
        [*rsync, "./", f"{THERE}:/opt/app/"],
    ]
    assert set_up[:-1] == stop[:-1] == start[:-1] == [*SSH, THERE]
    assert "set up" in set_up[-1]
    assert start[-1].startswith("bash --login -c 'export RAY_HEAD_IP=192.0.2.10; ray start")


def test_the_shipped_file_has_all_that_a_host_needs_to_join() -> None:
    said = [step[-1] for step in steps(yaml.safe_load(ONPREM.read_text()), "192.0.2.13")]
    assert said.index(next(s for s in said if s.endswith(":topwork/"))) < said.index(
        next(s for s in said if "ray start" in s)
    )


def test_hosts_that_ray_starts_itself_do_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "aws.yaml"
    file.write_text(yaml.safe_dump({**CLUSTER, "provider": {"type": "aws"}}))
    monkeypatch.setattr("sys.argv", ["join", str(file), "192.0.2.13"])
    with pytest.raises(SystemExit, match="only hosts of `type: local`"):
        main()
