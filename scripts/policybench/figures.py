"""What a replay came to, as named figures.

| name | what it is |
|---|---|
| TRACE.POLICY.ttft_mean, _p50, _p99 | arrival to first token |
| TRACE.POLICY.hit_rate | prompt tokens that the prefill worker had in its cache / all |
| TRACE.POLICY.moved_rate | prompt tokens whose KV the decode worker lacked / all |
| TRACE.POLICY.tpot_p50, _p99 | of each request: decode time / (output tokens - 1) |
| index.* | see index_speed.py |

Of several replays, which differ in how ties fell, each figure is the median.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from policybench.index_speed import IndexSpeed
from policybench.job import Job

INDEX_GOAL_US = 50.0


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    bound: float | None = None  # it holds below
    goal: str | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.bound is None else self.value < self.bound

    def as_json(self) -> dict[str, str | float | bool | None]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "holds": self.holds}


def replay_figures(jobs: Sequence[Job]) -> dict[str, tuple[float, str]]:
    """Value and unit by name, of one replay."""
    ttft_s = [job.ttft_s for job in jobs]
    tpot_ms = [job.tpot_s * 1e3 for job in jobs if job.tpot_s is not None] or [0.0]
    prompt_tokens = sum(job.input_tokens for job in jobs)
    return {
        "ttft_mean": (float(np.mean(ttft_s)), "s"),
        "ttft_p50": (float(np.percentile(ttft_s, 50)), "s"),
        "ttft_p99": (float(np.percentile(ttft_s, 99)), "s"),
        "hit_rate": (sum(job.cached_tokens for job in jobs) / prompt_tokens, "of prompt tokens"),
        "moved_rate": (sum(job.moved_tokens for job in jobs) / prompt_tokens, "of prompt tokens"),
        "tpot_p50": (float(np.percentile(tpot_ms, 50)), "ms"),
        "tpot_p99": (float(np.percentile(tpot_ms, 99)), "ms"),
    }


def trace_figures(
    trace: str, replays: dict[str, list[dict[str, tuple[float, str]]]], *, has_reuse: bool
) -> Iterator[Figure]:
    """replays: by policy. has_reuse: prompts share prefixes, so that kv_aware is to beat least_loaded."""
    values = {
        policy: {name: (median(run[name][0] for run in runs), unit) for name, (_, unit) in runs[0].items()}
        for policy, runs in replays.items()
    }
    for policy, figures in values.items():
        for name, (value, unit) in figures.items():
            is_goal = has_reuse and policy == "kv_aware" and name in ("ttft_mean", "ttft_p99")
            bound = values["least_loaded"][name][0] if is_goal else None
            goal = f"< least_loaded ({bound:.3f})" if bound is not None else None
            yield Figure(f"{trace}.{policy}.{name}", value, unit, bound, goal)


def index_figures(speed: IndexSpeed) -> Iterator[Figure]:
    goal = f"< {INDEX_GOAL_US:g}"
    yield Figure("index.query_p50", speed.query_p50_s * 1e6, "µs", INDEX_GOAL_US, goal)
    yield Figure("index.query_p99", speed.query_p99_s * 1e6, "µs", INDEX_GOAL_US, goal)
    yield Figure("index.update_per_block", speed.update_block_s * 1e6, "µs")
    yield Figure("index.leave", speed.leave_s * 1e3, "ms")
