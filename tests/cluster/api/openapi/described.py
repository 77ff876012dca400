"""A client that holds every response against the OpenAPI document of the server that sent it."""

import copy
import json
import re
from collections import Counter
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from tests.patience import PATIENCE


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document whose objects have no fields but those that it names."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        if schema.get("properties"):
            schema.setdefault("additionalProperties", False)
    return document


class Described:
    """Calls routes; what comes back must be what the document says."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        """Take an address, and headers with which it shows its document."""
        reply = httpx.get(f"{url}/openapi.json", headers=headers, timeout=PATIENCE)
        self.document = reply.raise_for_status().json()
        self.seen: Counter[tuple[str, str, str]] = Counter()  # of method, path and status
        self._closed = closed(self.document)
        self._validators: dict[str, Draft202012Validator] = {}
        self._url = url

    def __call__(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Make a call; read all of its response."""
        return self.checked(httpx.request(method, self._url + path, timeout=PATIENCE, **content))

    def checked(self, response: httpx.Response) -> httpx.Response:
        """Return a response that is as described."""
        method = response.request.method.lower()
        pattern = self.path_of(response.request.url.path, method)
        operation = self._closed["paths"][pattern][method]
        status = str(response.status_code)
        told = f"{method} {pattern} {status}: {response.text[:300]}"
        assert status in operation["responses"], told
        self.seen[method, pattern, status] += 1
        described = self._resolved(operation["responses"][status])
        known = {name.lower() for name in described["headers"]}
        assert {"retry-after", "www-authenticate", "x-stream-id"} & set(response.headers) <= known
        assert "x-request-id" in response.headers, told
        self._check_body(response, described, told)
        return response

    def path_of(self, path: str, method: str) -> str:
        """Return which path of the document a call is of: the one that says most of it."""
        fitting = [
            pattern
            for pattern, operations in self.document["paths"].items()
            if method in operations and re.fullmatch(re.sub(r"\{\w+\}", ".+", pattern), path)
        ]
        assert fitting, f"{method} {path} is not in the document"
        return max(fitting, key=lambda pattern: len(re.sub(r"\{\w+\}", "", pattern)))

    def has_field(self, body: dict[str, Any] | None, name: str) -> bool:
        """Tell whether a body, as an operation describes it, has a field."""
        schemas = self.document["components"]["schemas"]
        return body is not None and name in schemas[body["$ref"][21:]].get("properties", {})

    def errors_of(self, schema: dict[str, Any], value: object) -> list[str]:
        """Return what keeps a value from being as a schema says."""
        key = str(schema)
        if key not in self._validators:
            whole = {**schema, "components": self._closed["components"]}
            self._validators[key] = Draft202012Validator(whole)
        return [error.message for error in self._validators[key].iter_errors(value)]

    def _check_body(self, response: httpx.Response, described: Any, told: str) -> None:
        content = described.get("content")
        if content is None:
            assert response.content == b"", told
            return
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in content, f"{kind} is not described: {told}"
        if kind == "application/json":
            self._check(content[kind]["schema"], response.json(), told)
        elif kind == "text/event-stream":
            for value in events_of(response.text):
                self._check(content[kind]["x-itemSchema"], value, told)

    def _check(self, schema: dict[str, Any], value: object, told: str) -> None:
        errors = self.errors_of(schema, value)
        assert not errors, f"{errors[0][:600]}: {value}: {told}"

    def _resolved(self, described: dict[str, Any]) -> Any:
        reference = described.get("$ref")
        if reference is None:
            return described
        return self._closed["components"]["responses"][reference.rpartition("/")[2]]


def events_of(text: str) -> list[Any]:
    """Return the data of the events of a stream, but for [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    return [json.loads(line) for line in lines if line != "[DONE]"]
