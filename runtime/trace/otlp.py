"""Spans in OpenTelemetry's words, sent by its exporter (OTLP over HTTP, protobuf).

Needs the extra ``tracing``; imported only where ``tracing.endpoint`` is set. The SDK's own
processor is not used: it makes spans while they run, and drops without a count.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from runtime.config import TracingSection
from runtime.errors import ConfigError
from runtime.trace.spans import Export, Span, Spans
from runtime.version import installed_version

TIMEOUT_S = 5.0
"""Of one batch, retries included."""
SCOPE = "tandem"


def open_spans(
    section: TracingSection, registry: CollectorRegistry, *, role: str, instance: str = ""
) -> Spans | None:
    """The spans of this process; None where nobody wants them.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if not section.endpoint:
        return None
    return Spans(exporter(section.endpoint, role=role, instance=instance), registry)


def exporter(endpoint: str, *, role: str, instance: str) -> Export:
    """What sends spans to the collector at ``endpoint``.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import (
            SpanContext,
            SpanKind,
            Status,
            StatusCode,
            TraceFlags,
            TraceState,
        )
    except ImportError as error:
        problem = f"OpenTelemetry is not installed here ({error.name})"
        fix = 'pip install "tandem-serve[tracing]", or tracing.endpoint = ""'
        raise ConfigError("tracing.endpoint", endpoint, problem, fix) from error

    sender = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
    version = installed_version() or "0"
    named = {"service.name": f"tandem-{role}", "service.version": version}
    resource = Resource.create(named | ({"service.instance.id": instance} if instance else {}))
    scope = InstrumentationScope(SCOPE, version)

    def context_of(span: Span, span_id: str, *, is_remote: bool) -> SpanContext:
        return SpanContext(
            int(span.trace.trace_id, 16),
            int(span_id, 16),
            is_remote,
            TraceFlags(TraceFlags.SAMPLED),
            TraceState.from_header([span.trace.state]) if span.trace.state else None,
        )

    def readable(span: Span) -> ReadableSpan:
        parent = span.trace.parent_id
        return ReadableSpan(
            name=span.name,
            context=context_of(span, span.trace.span_id, is_remote=False),
            parent=context_of(span, parent, is_remote=span.is_server) if parent else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int(span.start * 1e9) + span.wall_ns,
            end_time=int(span.end * 1e9) + span.wall_ns,
        )

    def export(spans: Sequence[Span]) -> bool:
        return sender.export([readable(span) for span in spans]) is SpanExportResult.SUCCESS

    return export
