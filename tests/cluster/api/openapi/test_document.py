"""The OpenAPI document as such: valid, whole, and of the routes that there are."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import routing
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from cluster.api.app import create_app
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving

KEYS = "- {key: top-secret-1, tenant: a, scopes: [metrics]}"
# Fields that may hold any JSON whatever.
ANYTHING = {"cache_control", "summary", "config_dict"}


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving]) -> Serving:
    return serve_once(FakeScheduler())


@pytest.fixture(scope="module")
def document(serving: Serving) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{serving.url}/openapi.json").raise_for_status().json()
    return told


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, by_method in document["paths"].items():
        for method, operation in by_method.items():
            yield f"{method} {path}", operation


def references(part: Any) -> Iterator[str]:
    """Give every reference within a part of a document."""
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


@pytest.mark.slow  # the one with keys has all that is in it: five seconds
def test_without_keys_it_is_a_valid_openapi_document(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()


def test_streams_suit_tools_that_look_at_all_of_one_and_such_that_look_at_each_event(
    document: dict[str, Any],
) -> None:
    """schemathesis 4.32 is of the second kind."""
    streams = [
        content["text/event-stream"]["schema"]
        for _, operation in operations(document)
        for response in operation["responses"].values()
        if "text/event-stream" in (content := response.get("content", {}))
    ]
    assert len(streams) > 5
    for schema in streams:
        for value in ("event: a\ndata: {}\n\n", {"event": "a", "data": "{}"}):
            assert Draft202012Validator(schema).is_valid(value), (schema, value)


def test_its_schemas_are_valid_and_say_something(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert (
            schema.get("properties")
            or schema.get("patternProperties")
            or schema.get("anyOf")
            or name
            in (
                "JsonValue",
                "PinBody",
                "Ping",
            )
        )


def test_whatever_it_refers_to_is_in_it_and_what_is_in_it_is_referred_to(
    document: dict[str, Any],
) -> None:
    found = set(references(document))
    for reference in found:
        part: Any = document
        for key in reference.removeprefix("#/").split("/"):
            assert key in part, reference
            part = part[key]
    components = document["components"]
    for kind in ("schemas", "responses"):
        for name in components[kind]:
            assert f"#/components/{kind}/{name}" in found


def test_it_has_the_routes_of_the_application_and_no_others(
    serving: Serving, document: dict[str, Any]
) -> None:
    app = create_app(serving.router)
    of_app = {
        (method.lower(), route.path_format)
        for route in routing.iter_route_contexts(app.routes)
        for method in route.methods or ()
        if route.path not in ("/openapi.json", "/docs", "/redoc")
    }
    assert of_app == {
        (method, path) for path, by_method in document["paths"].items() for method in by_method
    }


def test_every_operation_says_what_it_is_and_what_an_unexpected_failure_looks_like(
    document: dict[str, Any],
) -> None:
    ids = set()
    known = {tag["name"] for tag in document["tags"]}
    for name, operation in operations(document):
        ids.add(operation["operationId"])
        assert operation["summary"] and set(operation["tags"]) <= known, name
        assert {"200", "500"} <= operation["responses"].keys(), name
        assert "422" not in operation["responses"], name
    assert len(ids) == sum(1 for _ in operations(document))


def test_examples_are_what_their_schemas_say(document: dict[str, Any]) -> None:
    count = 0
    for name, operation in operations(document):
        for part in (operation.get("requestBody"), *document["components"]["responses"].values()):
            for content in (part or {"content": {}})["content"].values():
                if "example" in content:
                    whole = {**content["schema"], "components": document["components"]}
                    assert Draft202012Validator(whole).is_valid(content["example"]), name
                    count += 1
    assert count > 20


def test_no_field_of_a_body_is_left_as_any_json(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        if name.endswith(("Body", "Param")) and name != "ErrorBody":
            for field, one in schema.get("properties", {}).items():
                is_told = one.keys() & {"type", "anyOf", "enum", "$ref", "const"}
                assert is_told or field in ANYTHING or "description" in one, (name, field)
                assert one.get("$ref") != "#/components/schemas/JsonValue", (name, field)


@pytest.mark.parametrize(
    ("change", "is_taken"),
    [
        ({}, True),
        ({"temprature": 1}, False),
        ({"temprature": None}, True),
        ({"suffix": ""}, True),
        ({"suffix": "a"}, False),
        ({"user": "somebody"}, True),
        ({"stream_options": {"chunk_size": 2}}, False),
        ({"stream_options": {"chunk_size": None}}, True),
        ({"stop": ["a"] * 17}, False),
        ({"tool_choice": "sometimes"}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"role": "any", "content": "a", "else": 1}]}, True),
    ],
)
def test_a_body_is_described_with_what_lies_within_it_and_what_is_refused(
    serving: Serving, document: dict[str, Any], change: dict[str, Any], is_taken: bool
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    body |= {"stream": True} | change
    whole = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    assert Draft202012Validator(whole).is_valid(body) is is_taken
    reply = httpx.post(f"{serving.url}/v1/chat/completions", json=body)
    assert (reply.status_code == 200) is is_taken, reply.text


def test_with_lenient_parameters_unknown_ones_may_be_there(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler(), lenient_parameters=True)
    document = httpx.get(f"{serving.url}/openapi.json").json()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temprature": 1}
    whole = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    assert Draft202012Validator(whole).is_valid(body)


def test_it_is_a_valid_openapi_document_and_keys_are_in_it_where_they_are_needed(
    serve: Callable[..., Serving], document: dict[str, Any], tmp_path: Path
) -> None:
    assert "securitySchemes" not in document["components"]
    assert "401" not in json.dumps([[*one["responses"]] for _, one in operations(document)])
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    serving = serve(FakeScheduler(), api_key_file=str(path))
    headers = {"Authorization": "Bearer top-secret-1"}
    with_keys = httpx.get(f"{serving.url}/openapi.json", headers=headers).json()
    OpenAPIV31SpecValidator(with_keys).validate()
    schemes = with_keys["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}
    for name, operation in operations(with_keys):
        is_open = operation["security"] == []
        assert is_open is ("401" not in operation["responses"]), name
        assert is_open is (httpx_status(serving.url, name) != 401), name


def httpx_status(url: str, operation: str) -> int:
    method, path = operation.split()
    return httpx.request(method, url + path.replace("{", "").replace("}", "")).status_code
