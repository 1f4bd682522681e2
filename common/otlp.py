"""Spans by OpenTelemetry, sent over OTLP/HTTP in batches by a thread of their own. Loaded only where configured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.lifecycle import Interval
from common.tracing import Attributes, Carrier

EXPORT_TIMEOUT_S = 3.0  # of one batch
CLOSE_TIMEOUT_S = 5.0  # then what has not been sent is lost

_PROPAGATOR = TraceContextTextMapPropagator()  # W3C's headers; what is malformed counts as none


class OtlpTracer:
    def __init__(self, endpoint: str, sample_share: float, service: str, instance: str) -> None:
        """endpoint: the collector's, without the path. Nothing here touches OpenTelemetry's global provider."""
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_share),  # whoever began a trace has decided for all
            resource=Resource.create({"service.name": service, "service.instance.id": instance}),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve")

    def begin(self, name: str, caller: Carrier, start_s: float | None = None) -> OtlpSpan:
        clock = _Clock()
        start_ns = None if start_s is None else clock.epoch_ns(start_s)
        span = self._tracer.start_span(name, _PROPAGATOR.extract(dict(caller)), SpanKind.SERVER, start_time=start_ns)
        return OtlpSpan(self._tracer, span, clock)

    def continues(self, caller: Carrier) -> bool:
        return trace.get_current_span(_PROPAGATOR.extract(dict(caller))).get_span_context().is_valid

    async def close(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._provider.shutdown), CLOSE_TIMEOUT_S)


class OtlpSpan:
    def __init__(self, tracer: trace.Tracer, span: trace.Span, clock: _Clock) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._context = trace.set_span_in_context(span, Context())
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, self._context)
        self.carrier: Carrier = tuple(headers.items())

    def end(self, stages: Sequence[Interval], attributes: Attributes, error: str = "") -> None:
        for stage in stages:
            start_ns, end_ns = self._clock.epoch_ns(stage.start_s), self._clock.epoch_ns(stage.end_s)
            self._tracer.start_span(stage.stage, self._context, start_time=start_ns).end(end_ns)
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._clock.epoch_ns(time.monotonic()))


class _Clock:
    """From time.monotonic to the time of day, as it was when the span began: steps of the latter tear no span apart."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def epoch_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns
