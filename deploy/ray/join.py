"""Adds a host to a cluster that runs, by its cluster file: `python -m deploy.ray.join FILE HOST`.

Ray's launcher hears of new `worker_ips` only with a head that is started anew, which would end all
requests. Owns doing with one more host what the launcher does with those it starts. Reads the file
as it is; what comes to be placed on the host is Ray's to say.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import yaml


def steps(cluster: dict[str, Any], host: str) -> Iterator[list[str]]:
    """Yield the commands that make a host one of the cluster's workers, in order."""
    auth = cluster["auth"]
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
    if "ssh_private_key" in auth:
        ssh += ["-i", os.path.expanduser(auth["ssh_private_key"])]
    there = f"{auth['ssh_user']}@{host}"
    for remote, local in cluster["file_mounts"].items():
        target = remote.removeprefix("~/")  # both ssh and rsync begin at home
        source = os.path.expanduser(local)
        yield [*ssh, there, f"mkdir -p {shlex.quote(str(PurePosixPath(target).parent))}"]
        excludes = [f"--exclude={pattern}" for pattern in cluster.get("rsync_exclude", ())]
        end = "/" if os.path.isdir(source) else ""
        paths = [f"{source}{end}", f"{there}:{target}{end}"]
        yield ["rsync", "-a", "-e", shlex.join(ssh), *excludes, *paths]
    head = shlex.quote(cluster["provider"]["head_ip"])
    for key in ("initialization_commands", "worker_setup_commands", "worker_start_ray_commands"):
        for command in cluster.get(key, ()):
            script = f"export RAY_HEAD_IP={head}; {command}"
            yield [*ssh, there, f"bash --login -c {shlex.quote(script)}"]


def main() -> None:
    """Run the steps; the first that fails is the last."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m deploy.ray.join CLUSTER_FILE HOST")
    cluster = yaml.safe_load(Path(sys.argv[1]).read_text())
    if cluster["provider"]["type"] != "local":
        sys.exit(f"{sys.argv[1]}: only hosts of `type: local` are added; Ray starts others itself")
    for step in steps(cluster, sys.argv[2]):
        print("+", shlex.join(step), flush=True)
        if subprocess.run(step, stdin=subprocess.DEVNULL).returncode != 0:
            sys.exit("this step failed, and those after it were not tried")


if __name__ == "__main__":
    main()
