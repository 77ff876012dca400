"""What Ray itself says, asked in a process of its own: its import reads settings and warns.

`python -m tests.helm.ray_facts` reads Serve configs as a JSON list and answers what Ray makes of
each, and which paths tell health.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any

from tests.helm.charts import ROOT, VALUES, of_kind, rendered, serve_config


@cache
def ray_facts() -> dict[str, Any]:
    """Return `paths` and, by the names of sets of values, what Ray reads in their Serve config."""
    names = [name for name in VALUES if of_kind(rendered(name), "RayService")]
    asked = json.dumps([serve_config(rendered(name)) for name in names])
    command = [sys.executable, "-W", "ignore", "-m", "tests.helm.ray_facts"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {"paths": answer["paths"], "configs": dict(zip(names, answer["configs"], strict=True))}


def _answer(configs: list[Any]) -> dict[str, Any]:
    from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
    from ray.serve._private.haproxy import HAProxyConfig
    from ray.serve.schema import ServeDeploySchema

    read = [ServeDeploySchema.model_validate(config).model_dump(mode="json") for config in configs]
    paths = [HAProxyConfig().health_check_endpoint, *PUBLIC_EXACT_PATHS]
    return {"paths": paths, "configs": read}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
