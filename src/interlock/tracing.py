"""Traces: one tree of spans from the request through the run and its steps to the tools, in the W3C format.

Without an exporter there are no spans and OpenTelemetry is not imported. A context from the caller is still passed
on, so that its trace does not end here.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from interlock.telemetry import log

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def accepted(header: str | None) -> str | None:
    """Return a valid `traceparent`, or None: for an invalid one the standard says to start a new trace."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def run_traceparent(run_id: UUID, given: str | None) -> str:
    """Return the context of a run's own span.

    Every process can compute it from the start, although the span is made only at the run's end.
    """
    match = _TRACEPARENT.fullmatch(given or "")
    trace, flags = (match[1], match[3]) if match else (run_id.hex, "01")
    return f"00-{trace}-{_span_of(run_id)}-{flags}"


def _span_of(run_id: UUID) -> str:
    return sha256(run_id.bytes).hexdigest()[:16]


class Spans:
    """Makes spans, if an exporter is configured."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "interlock"}
        self._provider = TracerProvider(resource=Resource.create(named), id_generator=_id_generator())
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("interlock")

    @contextmanager
    def span(
        self, name: str, attributes: Mapping[str, Any], *, parent: str | None = None, is_request: bool = False
    ) -> "Iterator[Span]":
        """Make a span around a block. Spans within are its children.

        Without `parent` it is a child of the current span.

        The block reports its own exceptions, because the text of an exception may hold a secret.
        """
        from opentelemetry.trace import SpanKind

        with self._tracer.start_as_current_span(
            name, context=_context(parent) if parent or is_request else None, attributes=attributes,
            kind=SpanKind.SERVER if is_request else SpanKind.INTERNAL, record_exception=False,
            set_status_on_exception=False,
        ) as span:  # fmt: skip
            yield span

    def run(
        self, run_id: UUID, given: str | None, name: str, began: datetime, ended: datetime,
        attributes: Mapping[str, Any], failure: str | None,
    ) -> None:  # fmt: skip
        """Make a run's span at the run's end. The run may have begun days ago, in another process."""
        own = run_traceparent(run_id, given).split("-")
        token = _forced.set((int(own[1], 16), int(own[2], 16)))
        try:
            span = self._tracer.start_span(
                name, context=_context(accepted(given)), attributes=attributes, start_time=_nanoseconds(began)
            )
        finally:
            _forced.reset(token)
        fail(span, failure)
        span.end(_nanoseconds(ended))

    def close(self) -> None:
        """Send the remaining spans and shut down."""
        self._provider.shutdown()


# None if no exporter is configured.
spans: Spans | None = None


def use(made: Spans | None) -> None:
    global spans
    spans = made


def configure() -> None:
    """Send spans to OTEL_EXPORTER_OTLP_ENDPOINT, if it is set."""
    if spans is not None or not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no_traces", detail=f"{error}; install interlock[otel] to send traces")
        return
    use(Spans(BatchSpanProcessor(OTLPSpanExporter())))


def close() -> None:
    if spans is not None:
        spans.close()


def current() -> str | None:
    """Return the `traceparent` of the current span, for requests to other systems."""
    if spans is None:
        return None
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def fail(span: "Span", why: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    if why is not None:
        span.set_status(Status(StatusCode.ERROR, why))


# ---------------------------------------------------------------- ids

_forced: ContextVar[tuple[int, int] | None] = ContextVar("forced", default=None)


def _id_generator() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random ids, except for the span of a run, whose id other spans have used already."""

        def generate_span_id(self) -> int:
            return forced[1] if (forced := _forced.get()) else super().generate_span_id()

        def generate_trace_id(self) -> int:
            return forced[0] if (forced := _forced.get()) else super().generate_trace_id()

    return Ids()


def _context(traceparent: str | None) -> "Context":
    """Return the context of a remote parent span. Without one, return an empty context and not the current span's."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if traceparent is None:
        return Context()
    _, trace, span, flags = traceparent.split("-")
    remote = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000
