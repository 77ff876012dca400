"""The OpenAPI document, what a client generator reads, and the values of bodies."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.api.http import num_values
from cluster.router.testing.fake_scheduler import FakeScheduler


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


def test_whatever_the_openapi_document_refers_to_is_in_it(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    document = httpx.get(f"{serving.url}/openapi.json").raise_for_status().json()
    for reference in references(document):
        part: Any = document
        for key in reference.removeprefix("#/").split("/"):
            assert key in part, reference
            part = part[key]


def test_a_body_is_described_with_what_lies_within_it(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler())
    document = httpx.get(f"{serving.url}/openapi.json").raise_for_status().json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    message = schema["properties"]["messages"]["items"]
    assert {"role", "content"} <= set(message["properties"])
    assert "$defs" not in str(schema) and "$ref" not in str(schema)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b'{"a": [1, 2, {"b": "x,[{"}]}', 5),
        (b'"a\\",[", [', 2),
        (b'"\\\\", [', 2),
        (b'"never ends, [', 0),
        (b'"a\nb,", {', 2),
        (b"", 0),
    ],
)
def test_values_are_counted_outside_of_texts(data: bytes, count: int) -> None:
    assert num_values(data, 1000) == count


@pytest.mark.parametrize("sign", [b",", b"[", b'"",', b'""', b'{"":'])
def test_more_values_than_the_limit_are_more_whatever_follows(sign: bytes) -> None:
    assert num_values(sign * 10_000, 100) > 100
