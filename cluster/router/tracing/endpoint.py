"""Where traces are sent, and by which protocol; what must be right about it before anything runs.

Neither imports nor needs OpenTelemetry.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

# As OpenTelemetry names them, the first one that is set.
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
Protocol = Literal["grpc", "http/protobuf"]
EXPORTERS: dict[Protocol, str] = {"grpc": "grpc", "http/protobuf": "http"}


def protocol_of(environment: Mapping[str, str]) -> Protocol:
    """Return how traces are sent: gRPC, as vLLM's, unless a variable says otherwise.

    Raises:
        ValueError: for a protocol that OpenTelemetry's exporters have not.
    """
    variable = next((name for name in PROTOCOL_VARIABLES if environment.get(name)), None)
    if variable is None:
        return "grpc"
    for protocol in EXPORTERS:
        if environment[variable] == protocol:
            return protocol
    raise ValueError(f"{variable}={environment[variable]!r} is neither grpc nor http/protobuf")


def check_endpoint(endpoint: str, environment: Mapping[str, str]) -> None:
    """Check an address that traces are to be sent to.

    Raises:
        ValueError: if it cannot be one of the protocol, or what sends them is not installed.
    """
    protocol = protocol_of(environment)
    schemes = ("http", "https", "grpc") if protocol == "grpc" else ("http", "https")
    try:
        url = urlsplit(endpoint)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{endpoint!r} is no address: {error}") from None
    if url.scheme not in schemes or not host:
        raise ValueError(f"{endpoint!r} is not of the form {schemes[0]}://HOST:PORT")
    if protocol == "grpc" and url.path not in ("", "/"):
        raise ValueError(
            f"{endpoint!r} has a path, which gRPC knows nothing of: leave it out, or set "
            f"{PROTOCOL_VARIABLES[0]}=http/protobuf"
        )
    if protocol == "http/protobuf" and not url.path:
        raise ValueError(f"{endpoint!r} has no path; collectors take traces at /v1/traces")
    if not is_installed(protocol):
        raise ValueError("OpenTelemetry's exporter is not installed: pip install 'topwork[otel]'")


def is_installed(protocol: Protocol) -> bool:
    """Tell whether what sends traces by this protocol is there."""
    package = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}.trace_exporter"
    try:
        return find_spec("opentelemetry.sdk.trace") is not None and find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it would be in
        return False
