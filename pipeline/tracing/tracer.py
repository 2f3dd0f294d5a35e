"""Spans of this process. OpenTelemetry is imported only where NIGHTJAR_TRACE_SHARE is above 0.

The share decides at the beginning of a trace, in the API. A caller that sends a `traceparent` has
decided already. Work that belongs to no trace makes no spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import nightjar
from nightjar.jobs.tracing import current_traceparent, in_trace, is_traceparent
from nightjar.pipeline.settings import Settings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

Attributes = Mapping[str, str | int]

_HEADER = "traceparent"
_NO_LIBRARY = (
    "NIGHTJAR_TRACE_SHARE is set, and OpenTelemetry is not installed: "
    "pip install 'nightjar-batch[traces]'"
)


class Traces:
    """Makes spans, once `open` was called; until then nothing."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None

    @property
    def is_on(self) -> bool:
        """Whether spans are made."""
        return self._tracer is not None

    def open(self, settings: Settings, process: str) -> None:
        """Send spans to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names.

        Does nothing where the share is 0.

        Raises:
            SettingsError: OpenTelemetry is not installed.
        """
        if not settings.trace_share:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415
                ParentBased,
                TraceIdRatioBased,
            )
        except ImportError as error:
            raise SettingsError(_NO_LIBRARY) from error
        named = {"service.name": f"nightjar-{process}", "service.version": nightjar.__version__}
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_share)),
            resource=Resource.create(named),  # OTEL_SERVICE_NAME goes before it
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = provider.get_tracer("nightjar", nightjar.__version__)

    @contextmanager
    def root(self, name: str, traceparent: str | None) -> Iterator[Span | None]:
        """Begin a trace, or go on with the caller's, where it is sampled."""
        with self._span(name, traceparent, {}) as span:
            yield span

    @contextmanager
    def span(
        self, name: str, traceparent: str | None = None, attributes: Attributes | None = None
    ) -> Iterator[None]:
        """Make a span below `traceparent`, by default below this thread's; none without either."""
        parent = traceparent or current_traceparent()
        if parent is None:
            yield
            return
        with self._span(name, parent, attributes or {}):
            yield

    @contextmanager
    def _span(
        self, name: str, traceparent: str | None, attributes: Attributes
    ) -> Iterator[Span | None]:
        if self._tracer is None:
            yield None
            return
        with self._tracer.start_as_current_span(
            name,
            context=_context(traceparent),
            attributes=dict(attributes),
            record_exception=False,  # its text may repeat a request
            set_status_on_exception=False,
        ) as span:
            found = span.get_span_context()
            ours = None
            if found.trace_flags.sampled:
                ours = f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
            with in_trace(ours):
                yield span


def _context(traceparent: str | None) -> Context:
    """Return the context of a parent; an empty one where there is none, or none that is valid."""
    from opentelemetry.context import Context  # noqa: PLC0415 - an extra
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    if not is_traceparent(traceparent):
        return Context()
    return TraceContextTextMapPropagator().extract({_HEADER: traceparent}, context=Context())


traces = Traces()
"""This process's."""
