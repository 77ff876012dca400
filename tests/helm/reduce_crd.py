"""Makes test data of KubeRay's CRD: `python -m tests.helm.reduce_crd VERSION < CRD > FILE`.

CRD is ray-operator/config/crd/bases/ray.io_rayservices.yaml of github.com/ray-project/kuberay at
the tag VERSION, under Apache-2.0. What is kept says so itself.
"""

import gzip
import json
import sys
from typing import Any

import yaml


def reduce_crd(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the schema of version v1, without descriptions and status."""
    (v1,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    schema = _without_descriptions(v1["schema"]["openAPIV3Schema"])
    del schema["properties"]["status"]
    return {
        "source": "github.com/ray-project/kuberay, ray-operator/config/crd/bases",
        "version": version,
        "license": "Apache-2.0",
        "changes": "version v1 only, without descriptions and status",
        "schema": schema,
    }


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without_descriptions(one) for name, one in value.items()}
        if key == "properties"
        else _without_descriptions(value)
        for key, value in node.items()
        if key != "description"
    }


if __name__ == "__main__":
    reduced = reduce_crd(yaml.load(sys.stdin, yaml.CSafeLoader), sys.argv[1])
    text = json.dumps(reduced, sort_keys=True, separators=(",", ":"))
    sys.stdout.buffer.write(gzip.compress(text.encode(), 9, mtime=0))
