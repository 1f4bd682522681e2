"""A span around each call that a worker serves, with the stages that its events begin."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from common.errors import ServingError
from common.lifecycle import Interval, Stage
from common.tracing import Span, Tracer, carrier_of

E = TypeVar("E", bound=Message)


@dataclass(frozen=True)
class CallStages:
    """Of a call whose events are a oneof `event`."""

    first: Stage  # that it begins with
    after: Mapping[str, Stage]  # what each kind of event begins; others begin nothing


class CallTrace:
    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name

    def over(
        self, events: AsyncGenerator[E, None], stages: CallStages, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[E, None]:
        """The same events; whoever closes these closes those. Where nobody traces, nothing stands between."""
        caller = carrier_of(context.invocation_metadata())
        if not self._tracer.continues(caller):
            return events
        return _traced(events, stages, self._tracer.begin(self._name, caller))


async def _traced(events: AsyncGenerator[E, None], stages: CallStages, span: Span) -> AsyncGenerator[E, None]:
    passed: list[Interval] = []
    stage, start_s, error = stages.first, time.monotonic(), ""
    try:
        async with aclosing(events):
            async for event in events:
                following = stages.after.get(event.WhichOneof("event") or "", stage)
                if following is not stage:
                    now_s = time.monotonic()
                    passed.append(Interval(stage, start_s, now_s))
                    stage, start_s = following, now_s
                yield event
    except ServingError as failure:
        error = type(failure).__name__
        raise
    finally:
        span.end([*passed, Interval(stage, start_s, time.monotonic())], {}, error)
