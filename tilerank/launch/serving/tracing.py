"""Spans of requests, sent by OpenTelemetry's own library where its environment names a receiver."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from tilerank.runtime.server.monitoring.request_log import LoggedRequest

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_PACKAGE = "opentelemetry-exporter-otlp-proto-http"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""gen_ai.operation.name of routes; other routes have none."""


def check() -> None:
    """Raise LaunchError if the environment asks for spans that cannot be sent."""
    asking = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if asking is None:
        return
    try:
        distribution(_PACKAGE)
    except PackageNotFoundError as e:
        raise LaunchError(f"{asking} is set: expected the package {_PACKAGE}; pip install 'tilerank[otel]'") from e
    for name in _PROTOCOLS:
        if (protocol := os.environ.get(name, _HTTP)) != _HTTP:
            raise LaunchError(f"{name}: expected {_HTTP}, found {protocol}")


@contextmanager
def request_spans(model: str, version: str) -> Iterator[Callable[[LoggedRequest], None] | None]:
    """Yield what makes a span of each request that has ended; None if the environment names no receiver. Spans that
    wait are sent at the end of the context. model: its name for clients. version: of this server."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = Resource({"service.name": "tilerank", "service.version": version})
    named = ours.merge(OTELResourceDetector().detect())  # the names of the environment win
    provider = TracerProvider(resource=Resource.create(named.attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield _Spans(provider.get_tracer("tilerank", version), model).add
    finally:
        provider.shutdown()


class _Spans:
    """Makes spans with the names of OpenTelemetry's conventions for HTTP servers and for generative models."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def add(self, request: LoggedRequest) -> None:
        """Make the span of a request, unless monitors repeat it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if request.is_repeated:
            return
        parent = {} if request.traceparent is None else {"traceparent": request.traceparent}
        span = self._tracer.start_span(
            f"{request.method} {request.route}",
            TraceContextTextMapPropagator().extract(parent),
            SpanKind.SERVER,
            self._attributes(request),
            start_time=request.began_ns,
        )
        if request.status >= 500 or request.end == "failed":
            span.set_status(Status(StatusCode.ERROR))
        if request.first_s is not None:
            span.add_event("first token", timestamp=request.began_ns + round(request.first_s * 1e9))
        span.end(request.began_ns + round(request.took_s * 1e9))

    def _attributes(self, request: LoggedRequest) -> dict[str, Any]:
        found: dict[str, Any] = {
            "http.request.method": request.method,
            "http.route": request.route,
            "http.response.status_code": request.status,
            "tilerank.request_id": request.id,
        }
        if request.answers:
            usages = [answer.usage for answer in request.answers]
            found |= {
                "gen_ai.provider.name": "tilerank",
                "gen_ai.response.model": self._model,
                "gen_ai.response.id": request.answers[0].id,
                "gen_ai.response.finish_reasons": [answer.end or "failed" for answer in request.answers],
                "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
                "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            }
            if request.route in _OPERATIONS:
                found["gen_ai.operation.name"] = _OPERATIONS[request.route]
        return found
