"""What is refused before anything runs that would send traces into nothing."""

import sys

import pytest

from cluster.router.tracing.endpoint import check_endpoint, is_installed, protocol_of

HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": ""}, "grpc"),
        (HTTP, "http/protobuf"),
        (HTTP | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ],
)
def test_the_protocol_is_what_the_first_variable_says(
    environment: dict[str, str], protocol: str
) -> None:
    assert protocol_of(environment) == protocol


@pytest.mark.parametrize(
    ("endpoint", "environment"),
    [
        ("http://127.0.0.1:4317", {}),
        ("grpc://collector:4317", {}),
        ("https://collector", {}),
        ("http://[::1]:4317/", {}),
        ("http://127.0.0.1:4318/v1/traces", HTTP),
        ("https://collector/", HTTP),
    ],
)
def test_an_address_that_fits_the_protocol_is_taken(
    endpoint: str, environment: dict[str, str]
) -> None:
    check_endpoint(endpoint, environment)


@pytest.mark.parametrize(
    ("endpoint", "environment", "reason"),
    [
        ("localhost:4317", {}, "not of the form http://HOST:PORT"),
        ("", {}, "not of the form"),
        ("http://", {}, "not of the form"),
        ("file:///etc/passwd", {}, "not of the form"),
        ("http://[::1", {}, "is no address"),
        ("http://h:99999", {}, "is no address"),
        ("http://h:4318/v1/traces", {}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"),
        ("http://h:4318", HTTP, "/v1/traces"),
        ("grpc://h:4317/", HTTP, "not of the form"),
        ("http://h", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "neither grpc nor"),
    ],
)
def test_an_address_or_a_protocol_that_cannot_be_is_refused_with_the_reason(
    endpoint: str, environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_endpoint(endpoint, environment)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp"])
def test_what_is_not_installed_is_named_with_the_extra_that_has_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert not is_installed("grpc")
    with pytest.raises(ValueError, match=r"pip install 'topwork\[otel\]'"):
        check_endpoint("http://127.0.0.1:4317", {})
