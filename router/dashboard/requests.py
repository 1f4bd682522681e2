"""The requests that run, and the last ones that ended, as their stages. No prompt, no answer, no tenant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import ServingError
from common.lifecycle import Interval
from router.request import Request

MAX_ENDED = 64
MAX_RUNNING = 32  # that are shown, the newest


@dataclass(frozen=True)
class RequestView:
    """One request as it was when it was looked at."""

    request_id: str
    arrival_s: float  # since the epoch
    state: str
    error: str  # its type; empty if there is none
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    end_to_end_s: float  # so far
    prefill_worker: str  # empty: the decode worker computed the prompt
    decode_worker: str
    placement: str
    attempts: int
    migrations: int
    stages: tuple[tuple[str, float, float], ...]  # name, start and end in seconds since its arrival


class RecentRequests:
    def __init__(self) -> None:
        self._ended: deque[RequestView] = deque(maxlen=MAX_ENDED)

    def add(self, request: Request, error: ServingError | None) -> None:
        self._ended.append(view_of(request, error))

    def views(self, running: Iterable[Request]) -> list[RequestView]:
        """The newest arrivals first, those that run before all others."""
        newest = sorted(running, key=lambda request: request.timeline.arrival_s, reverse=True)[:MAX_RUNNING]
        return [view_of(request, None) for request in newest] + list(reversed(self._ended))


def view_of(request: Request, error: ServingError | None) -> RequestView:
    timeline = request.timeline
    intervals = [*timeline.intervals] if timeline.is_ended else [*timeline.intervals, timeline.current]
    return RequestView(
        request_id=request.request_id,
        arrival_s=time.time() - time.monotonic() + timeline.arrival_s,
        state=timeline.state,
        error=type(error).__name__ if error else "",
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.cached_tokens,
        output_tokens=timeline.num_output_tokens,
        ttft_s=timeline.ttft_s,
        tpot_s=timeline.tpot_s,
        end_to_end_s=timeline.end_to_end_s,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        placement=request.placement,
        attempts=request.attempts,
        migrations=request.migrations,
        stages=tuple(_relative(interval, timeline.arrival_s) for interval in intervals),
    )


def _relative(interval: Interval, arrival_s: float) -> tuple[str, float, float]:
    return str(interval.stage), interval.start_s - arrival_s, interval.end_s - arrival_s
