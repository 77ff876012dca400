"""Traces as OpenTelemetry's spans, sent by its SDK over OTLP.

The one module that knows OpenTelemetry, which need not be installed: it is imported where somebody
asks for traces. Headers, certificates, sampling, names of the service and all else is the SDK's to
read from its environment variables. The tracer is our own, not the process's: others may have one.
"""

import os
import time
from collections.abc import Iterable, Mapping

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.router.tracing.call_trace import CallTrace, Phase
from cluster.router.tracing.endpoint import protocol_of

SCOPE = "topwork"
HTTP_SERVER_ERROR = 500


class Tracer:
    """Makes a span of each call that is sampled; `close` sends what has not been sent."""

    def __init__(self, endpoint: str, version: str, router: str) -> None:
        attributes = {"service.version": version, "service.instance.id": router}
        resource = Resource.create(attributes)
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            resource = resource.merge(Resource({SERVICE_NAME: SCOPE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer(SCOPE, version)

    def begin(self, trace: CallTrace, headers: Iterable[tuple[bytes, bytes]]) -> Span | None:
        """Return the span of a call, the child of its caller's.

        None if the sampler wants none: by default the caller decides.
        """
        carrier: dict[str, str] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                text = key.decode()
                joined = value.decode("latin-1")
                carrier[text] = f"{carrier[text]},{joined}" if text in carrier else joined
        context = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            trace.operation, context, kind=SpanKind.SERVER, start_time=trace.at(trace.arrival)
        )
        return span if span.is_recording() else None

    def end(self, span: Span, trace: CallTrace, http: Mapping[str, str | int]) -> None:
        """End the span of a call, and make those of its parts."""
        now = time.monotonic()
        trace.ended(now)
        for one in trace.phases:
            self._make(one, span, trace)
        span.update_name(trace.name)
        span.set_attributes(trace.attributes)
        span.set_attributes(http)
        for event in trace.events:
            span.add_event(event.name, event.attributes, trace.at(event.at))
        status = http.get("http.response.status_code", HTTP_SERVER_ERROR)
        assert isinstance(status, int)
        error = trace.error or (str(status) if status >= 400 else "")
        if error:
            span.set_attribute("error.type", error)
        if status >= HTTP_SERVER_ERROR or trace.error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(trace.at(now))

    def close(self) -> None:
        """Send what has not been sent, and make no more."""
        self._provider.shutdown()

    def _make(self, one: Phase, parent: Span, trace: CallTrace) -> None:
        span = self._tracer.start_span(
            one.name,
            set_span_in_context(parent),
            attributes=one.attributes,
            start_time=trace.at(one.start),
        )
        for part in one.parts:
            self._make(part, span, trace)
        if one.error:
            span.set_attribute("error.type", one.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(trace.at(one.end))


def _exporter(endpoint: str) -> SpanExporter:
    if protocol_of(os.environ) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        over_grpc: SpanExporter = OTLPSpanExporter(
            endpoint, insecure=not endpoint.startswith("https://")
        )
        return over_grpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpSpanExporter,
    )

    over_http: SpanExporter = HttpSpanExporter(endpoint)
    return over_http
