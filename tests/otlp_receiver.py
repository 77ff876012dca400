"""An OTLP collector for tests: takes what OpenTelemetry's own exporter sends over HTTP."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.patience import PATIENCE

ENVIRONMENT = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


@dataclass(frozen=True)
class SentSpan:
    """A span as a collector sees it; moments in nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str  # "": it has none
    name: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    trace_state: str
    resource: dict[str, Any]

    def holds(self, other: "SentSpan") -> bool:
        """Tell whether another one is a child of this that begins and ends within it."""
        is_child = (other.trace_id, other.parent_id) == (self.trace_id, self.span_id)
        return is_child and self.start <= other.start <= other.end <= self.end


class Receiver:
    """What has been sent to one address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.headers: list[dict[str, str]] = []
        self._spans: list[SentSpan] = []
        self._changed = threading.Condition()

    def take(self, headers: dict[str, str], body: bytes) -> None:
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.headers.append(headers)
            for of_resource in request.resource_spans:
                resource = attributes_of(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self._spans += (sent_span(span, resource) for span in of_scope.spans)
            self._changed.notify_all()

    @property
    def spans(self) -> list[SentSpan]:
        with self._changed:
            return list(self._spans)

    def wait(self, holds: Callable[[list[SentSpan]], bool]) -> list[SentSpan]:
        """Return all spans when something holds of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self._spans), PATIENCE), self._spans
            return list(self._spans)

    def wait_for_calls(self, count: int) -> list[SentSpan]:
        """Return all spans when those of so many calls are there; of a call they come together."""
        return self.wait(lambda spans: sum(span.kind == SERVER for span in spans) >= count)


SERVER = 2  # a kind of span


def sent_span(span: Any, resource: dict[str, Any]) -> SentSpan:
    return SentSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=attributes_of(span.attributes),
        events=[(event.name, attributes_of(event.attributes)) for event in span.events],
        is_error=span.status.code == 2,
        trace_state=span.trace_state,
        resource=resource,
    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Yield a collector that takes spans on this host."""
    receivers: list[Receiver] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            receivers[0].take(headers, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receivers.append(Receiver(f"http://127.0.0.1:{server.server_address[1]}/v1/traces"))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receivers[0]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
