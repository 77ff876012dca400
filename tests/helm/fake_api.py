"""A Kubernetes API server of memory: enough for Helm to install, upgrade, roll back and uninstall.

Owns discovery of the kinds that the chart makes, and objects by path: POST, GET, PATCH (merged or
applied), PUT and DELETE.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

# Group and version, then kinds by the name of their resource.
KINDS = {
    "v1": {
        "configmaps": "ConfigMap",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "pods": "Pod",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "ray.io/v1": {"rayservices": "RayService"},
}


class FakeApi:
    """The state of the server, and the answer to each request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}  # by path

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the objects of a kind, by name."""
        found = [one for one in self.objects.values() if one["kind"] == kind]
        return sorted(found, key=lambda one: str(one["metadata"]["name"]))

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return status and body of an answer."""
        if (known := _discovery().get(path)) is not None and method == "GET":
            return 200, known
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, _failure(409, "AlreadyExists", path)
            self.objects[path] = body
            return 201, body
        if path not in self.objects:
            if method != "PATCH" or "apiVersion" not in body:  # applied: it may be new
                return 404, _failure(404, "NotFound", path)
            self.objects[path] = {}
        if method in ("PATCH", "PUT"):
            applied = "apiVersion" in body
            self.objects[path] = body if applied else _merge(self.objects[path], body)
        if method == "DELETE":
            return 200, self.objects.pop(path)
        return 200, self.objects[path]


def _merge(one: Any, patch: Any) -> Any:
    """Return an object after a JSON merge patch."""
    if not (isinstance(one, dict) and isinstance(patch, dict)):
        return patch
    merged = {key: _merge(one.get(key), value) for key, value in patch.items() if value is not None}
    return {**{key: value for key, value in one.items() if key not in patch}, **merged}


def _failure(code: int, reason: str, path: str) -> dict[str, Any]:
    message = f"{path}: {reason}"
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**status, "code": code, "reason": reason, "message": message}


def _discovery() -> dict[str, Any]:
    groups = []
    served: dict[str, Any] = {}
    pages: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for version, kinds in KINDS.items():
        resources = [
            {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": _VERBS}
            for name, kind in kinds.items()
        ]
        page = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        path = "api/v1" if version == "v1" else f"apis/{version}"
        pages[f"/{path}"] = page
        pages[f"/openapi/v3/{path}"] = _openapi(version)
        served[path] = {"serverRelativeURL": f"/openapi/v3/{path}"}
        if version != "v1":
            named = {"groupVersion": version, "version": version.rpartition("/")[2]}
            name = version.rpartition("/")[0]
            groups.append({"name": name, "versions": [named], "preferredVersion": named})
    pages["/openapi/v3"] = {"paths": served}
    return {**pages, "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


def _openapi(version: str) -> dict[str, Any]:
    """Return what Helm looks up: that this server validates fields itself."""
    group, _, name = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for resource, kind in KINDS[version].items():
        of = {"group": group, "version": name, "kind": kind}
        patch = {"parameters": parameters, "x-kubernetes-group-version-kind": of, "responses": {}}
        paths[f"/{resource}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}


_VERBS = ["create", "delete", "get", "list", "patch", "update"]


@contextmanager
def fake_api() -> Iterator[tuple[FakeApi, str]]:
    """Serve on a free port of loopback; yield the state and the address."""
    api = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet for an answer: two would wait for each other

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            text = self.rfile.read(length)
            body = yaml.safe_load(text) if text else None
            status, answer = api.answer(self.command, self.path.partition("?")[0], body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield api, f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()
