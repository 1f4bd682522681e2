"""Spans of a request across the router and its workers. Off unless telemetry.otlp_endpoint names a collector.

    router   request ─┬─ queue, reserve, prefill_queue, ...       common/lifecycle.py, as the router saw it
    P                 ├─ prefill_worker ── prefill_queue, prefill, transfer
    D                 └─ decode_worker ─── reserve, transfer, decode_wait, decode

Who calls hands its span on as W3C headers (traceparent, tracestate): a client over HTTP or gRPC, the router in the
metadata of its calls. Spans never hold prompts or answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from common.config import TelemetrySection
from common.errors import ConfigError
from common.lifecycle import Interval

TRACE_HEADERS = ("traceparent", "tracestate")
Carrier = tuple[tuple[str, str], ...]  # those headers that are there, as gRPC takes metadata
NO_CARRIER: Carrier = ()
Attributes = Mapping[str, str | int]


class Span(Protocol):
    """Something that has begun."""

    @property
    def carrier(self) -> Carrier:
        """For those who are called on its behalf."""

    def end(self, stages: Sequence[Interval], attributes: Attributes, error: str = "") -> None:
        """It is over now, and so are its stages (by time.monotonic), which become spans within it. error: its type."""


class Tracer(Protocol):
    def begin(self, name: str, caller: Carrier, start_s: float | None = None) -> Span:
        """start_s: by time.monotonic, where it began before now. caller: of an unreadable one nothing is taken."""

    def continues(self, caller: Carrier) -> bool:
        """Whether a span would be part of somebody's trace. Workers begin none of their own."""

    async def close(self) -> None:
        """Send what has not been sent yet, within a bound."""


def make_tracer(section: TelemetrySection, service: str, instance: str) -> Tracer:
    """service, instance: who the spans are by, such as "pdserve-prefill" and "prefill-0". Raises: ConfigError."""
    if section.otlp_endpoint is None:
        return NO_TRACER
    try:
        from common.otlp import OtlpTracer  # an optional extra
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint needs OpenTelemetry ({error.name} is missing): pip install 'pdserve[otel]'"
        ) from error
    return OtlpTracer(section.otlp_endpoint, section.sample_share, service, instance)


class NoSpan:
    carrier = NO_CARRIER

    def end(self, stages: Sequence[Interval], attributes: Attributes, error: str = "") -> None:
        return


class NoTracer:
    def begin(self, name: str, caller: Carrier, start_s: float | None = None) -> NoSpan:
        return NoSpan()

    def continues(self, caller: Carrier) -> bool:
        return False

    async def close(self) -> None:
        return


NO_TRACER = NoTracer()


def carrier_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Carrier:
    """The trace headers among a call's headers or metadata."""
    return tuple((key, value) for key, value in metadata or () if key in TRACE_HEADERS and isinstance(value, str))
