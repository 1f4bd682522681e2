"""The router's Prometheus metrics, and the one log line that each request leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from common.errors import ServingError
from common.lifecycle import Stage, Timeline
from router.gap_histogram import GapHistogram
from router.request import Request

logger = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TTFT_SECONDS = (
    *(0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)


class RouterMetrics:
    """Names carry units; docs/architecture.md lists them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.on_ended: Callable[[Request, ServingError | None], None] = lambda request, error: None
        self.requests = Counter(
            "requests_total", "Requests by how they ended", ["state", "error"], registry=self.registry
        )
        self.refusals = Counter(
            "refusals_total",
            "Callers turned away before they were a request: no valid key, or over their limit",
            ["error"],
            registry=self.registry,
        )
        self.retries = Counter(
            "request_retries_total", "Attempts begun again, by cause", ["error"], registry=self.registry
        )
        self.migrations = Counter(
            "request_migrations_total", "Retries in the middle of an answer", registry=self.registry
        )
        self.refused_retries = Counter(
            "request_retries_refused_total",
            "Failures that were not tried again because there were too many retries, by cause",
            ["error"],
            registry=self.registry,
        )
        self.placements = Counter(
            "placements_total",
            "Attempts by who computed the prompt, a prefill worker or the decode worker itself, and why",
            ["computed_by", "reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens of ended requests", registry=self.registry)
        self.output_tokens = Counter("output_tokens_total", "Tokens streamed to clients", registry=self.registry)
        self.dropped_index_blocks = Counter(
            "prefix_index_dropped_blocks_total",
            "Blocks of the workers' prefix caches that the router forgot: router.max_index_blocks is too small",
            registry=self.registry,
        )
        self.pair_checks = Counter(
            "pair_checks_total",
            "Self-tests of pairs of workers, by result: passed, disagreed, incompatible; tried again: busy, failed",
            ["result"],
            registry=self.registry,
        )
        self.ttft = Histogram("ttft_seconds", "Time to first token", buckets=TTFT_SECONDS, registry=self.registry)
        self.tpot = Histogram(
            "tpot_seconds", "Time per output token of an answer", buckets=TOKEN_SECONDS, registry=self.registry
        )
        self.itl = GapHistogram("itl_seconds", "Time between two tokens", TOKEN_SECONDS, self.registry)
        self.stage = Histogram(
            "request_stage_seconds",
            "Time in each stage of a request",
            ["stage"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def note_token(self, timeline: Timeline, gap_s: float | None) -> None:
        """Called for every token; gap_s: since the one before."""
        if gap_s is not None:
            self.itl.observe(gap_s)
        elif timeline.ttft_s is not None:
            self.ttft.observe(timeline.ttft_s)

    def record(self, request: Request, error: ServingError | None) -> None:
        """Called once per request, when it has ended."""
        timeline = request.timeline
        self.requests.labels(timeline.state.value, type(error).__name__ if error else "").inc()
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        self.output_tokens.inc(timeline.num_output_tokens)
        self.migrations.inc(request.migrations)
        if timeline.tpot_s is not None:
            self.tpot.observe(timeline.tpot_s)
        for stage, seconds in timeline.stages.items():
            self.stage.labels(stage.value).observe(seconds)
        self.on_ended(request, error)
        logger.info(
            "%s %s prompt=%d output=%d ttft_s=%s transfer_s=%.3f end_to_end_s=%.3f "
            "prefill=%s decode=%s attempts=%d migrations=%d placement=%s%s",
            request.request_id,
            timeline.state,
            len(request.prompt_token_ids),
            timeline.num_output_tokens,
            "-" if timeline.ttft_s is None else f"{timeline.ttft_s:.3f}",
            timeline.stages.get(Stage.TRANSFER, 0.0),
            timeline.end_to_end_s,
            request.prefill_worker or "-",
            request.decode_worker or "-",
            request.attempts,
            request.migrations,
            request.placement.replace(": ", "/") or "-",
            f" error={type(error).__name__}: {error.message}" if error else "",
        )
