"""Renders the chart with Helm's own engine, and finds the parts that tests look at.

Owns the matrix of values.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
VALUES = {path.stem: path for path in sorted((Path(__file__).parent / "values").glob("*.yaml"))}

Object = dict[str, Any]
KEYS = {"apiKeys": {"secretName": "keys"}}  # the least that can be served


@cache
def chart() -> helm_python.Chart:
    """Return the chart as it lies there."""
    return helm_python.Chart.load(CHART)


def values_of(name: str) -> Object:
    """Return a set of values of the matrix."""
    read: Object = yaml.safe_load(VALUES[name].read_text())
    return read


def render(values: Object, release: str = "demo", namespace: str = "prod") -> list[Object]:
    """Return all objects of a release."""
    files = chart().render(values, name=release, namespace=namespace)
    documents: list[Object] = []
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            documents += [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]
    return documents


@cache
def rendered(name: str) -> list[Object]:
    """Return all objects of a set of the matrix; nobody changes them."""
    return render(values_of(name))


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    """Return the objects of one kind."""
    return [one for one in objects if one["kind"] == kind]


def the(objects: list[Object], kind: str) -> Object:
    """Return the one object of a kind."""
    (only,) = of_kind(objects, kind)
    return only


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """Return metadata and spec of each kind of pods, by its component."""
    found: dict[str, Object] = {}
    for one in objects:
        for template in _templates(one):
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


def _templates(one: Object) -> Iterator[Object]:
    if one["kind"] == "Pod":
        yield one
    elif one["kind"] == "Deployment":
        yield one["spec"]["template"]
    elif one["kind"] == "RayService":
        cluster = one["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]


def containers(template: Object) -> list[Object]:
    """Return all containers of a pod, those that only start it too."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def serve_config(objects: list[Object]) -> Object:
    """Return the Serve config of the RayService."""
    config: Object = yaml.safe_load(the(objects, "RayService")["spec"]["serveConfigV2"])
    return config


def served(objects: list[Object]) -> Object:
    """Return what `topwork serve` is told, by Serve's args or by a file."""
    if of_kind(objects, "RayService"):
        (application,) = serve_config(objects)["applications"]
        args: Object = application["args"]
        return args
    (config,) = [one for one in of_kind(objects, "ConfigMap") if "topwork.yaml" in one["data"]]
    told: Object = yaml.safe_load(config["data"]["topwork.yaml"])
    return told
