"""Strict schemas of what the chart renders: Kubernetes' own, KubeRay's, and small ones of others.

Owns strictness: a field that a schema does not know is an error, unless it says that any may be.
"""

import gzip
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

_DATA = Path(__file__).parent / "data"
KUBERNETES = ("1.28", "1.37")  # the oldest that Chart.yaml takes, and the newest there is
KUBERAY = ("1.5.1", "1.7.0")


def faults(one: dict[str, Any], kubernetes: str, kuberay: str) -> list[str]:
    """Return what is wrong with an object, each with where it is."""
    validator = _validator(one["apiVersion"], one["kind"], kubernetes, kuberay)
    found = validator.iter_errors(one)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]


@cache
def _validator(api_version: str, kind: str, kubernetes: str, kuberay: str) -> Draft202012Validator:
    if kind == "RayService":
        return Draft202012Validator(_rayservice(kuberay))
    others = _others()
    if kind in others:
        return Draft202012Validator(others[kind])
    folder = (
        files("kubernetes_validate") / "kubernetes-json-schema" / f"v{kubernetes}.0-local-strict"
    )
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.split(".")[0], version)))
    schema = json.loads((folder / f"{name}.json").read_text())
    return Draft202012Validator(schema, registry=_definitions(kubernetes))


@cache
def _definitions(kubernetes: str) -> Registry[Any]:
    folder = (
        files("kubernetes_validate") / "kubernetes-json-schema" / f"v{kubernetes}.0-local-strict"
    )
    contents = json.loads((folder / "_definitions.json").read_text())
    return Resource.from_contents(contents) @ Registry()


@cache
def _others() -> dict[str, Any]:
    """Return the schemas by kind that no package has."""
    read: dict[str, Any] = yaml.safe_load((_DATA / "others.yaml").read_text())
    return {kind: _strict(schema) for kind, schema in read["kinds"].items()}


@cache
def _rayservice(kuberay: str) -> Any:
    packed = (_DATA / f"rayservice-v{kuberay}.json.gz").read_bytes()
    return _strict(json.loads(gzip.decompress(packed))["schema"])


def _strict(node: Any) -> Any:
    """Return an OpenAPI schema as JSON Schema that refuses what it does not name."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {
        key: {name: _strict(one) for name, one in value.items()}
        if key == "properties"
        else _strict(value)
        for key, value in node.items()
    }
    if node.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict["type"] = ["integer", "string"]
    if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict
