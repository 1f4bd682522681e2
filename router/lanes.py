"""Live workers as lanes: what each has ahead of it, and how fast it computes prompts beside its streams."""

from __future__ import annotations

import time
from statistics import fmean

from common.config import Role
from router.forecast import MIN_SPARE_SHARE, Lane, spare_share
from router.policy import PREFILL_QUEUE_S, PREFILL_QUEUE_TOKENS
from router.registry import Registry
from router.request import Request
from router.worker import Worker


class Lanes:
    def __init__(self, registry: Registry, tpot_goal_s: float) -> None:
        self._registry = registry
        self._tpot_goal_s = tpot_goal_s

    def of(self, worker: Worker) -> Lane | None:
        """None: nothing is known, or its streams leave no time."""
        s_per_token = self.s_per_token(worker)
        spare = 1.0
        if worker.role is not Role.PREFILL and worker.load.num_running:
            spare = spare_share(worker.load.decode_step_s, self._tpot_goal_s)
        if s_per_token is None or spare <= MIN_SPARE_SHARE:
            return None
        return Lane(worker.prompts.tokens, s_per_token / spare)

    def queue_tokens(self, worker: Worker) -> int:
        """How many prompt tokens may wait there to be computed."""
        lane = self.of(worker)
        return PREFILL_QUEUE_TOKENS if lane is None else int(PREFILL_QUEUE_S / lane.s_per_token)

    def has_room(self, worker: Worker) -> bool:
        """For a prompt to compute beside its streams; one is always tried."""
        prompts = worker.prompts
        return prompts.given_tokens == 0 or prompts.tokens < self.queue_tokens(worker)

    def ttft_s(self, worker: Worker, uncached_tokens: int) -> float | None:
        """From now, if a prompt is sent there now. None: not known, or its streams leave no time."""
        lane = self.of(worker)
        return None if lane is None else lane.free_s + uncached_tokens * lane.s_per_token

    def s_per_token(self, worker: Worker) -> float | None:
        """Measured there or, before that, what the others do on average; None: nobody has measured yet."""
        if worker.load.prefill_s_per_token > 0:
            return worker.load.prefill_s_per_token
        known = [other.load.prefill_s_per_token for other in self._registry.workers]
        return fmean(positive) if (positive := [seconds for seconds in known if seconds > 0]) else None


def age_s(request: Request) -> float:
    return time.monotonic() - request.timeline.arrival_s
