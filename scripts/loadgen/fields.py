"""What a summary holds, by the names that `vllm bench serve` gives it."""

from __future__ import annotations

from loadgen.metrics import Distribution, Summary

LATENCIES = (
    ("TTFT", "ttft", "time to first token"),
    ("TPOT", "tpot", "time per output token after the first"),
    ("ITL", "itl", "gap between token events"),
    ("end-to-end", "e2el", ""),
)
RATES = (
    ("requests/s", "request_throughput"),
    ("output tokens/s", "output_throughput"),
    ("total tokens/s", "total_token_throughput"),
)
COUNTS = (
    ("completed", "completed"),
    ("failed", "failed"),
    ("input tokens", "total_input_tokens"),
    ("of them cached", "total_cached_tokens"),
    ("output tokens", "total_output_tokens"),
)


def distribution_of(summary: Summary, key: str) -> Distribution | None:
    distribution: Distribution | None = getattr(summary, key)
    return distribution


def rate_of(summary: Summary, key: str) -> float | None:
    """None when nothing was completed: an interrupt before the first answer is no speed of 0."""
    rate: float = getattr(summary, key)
    return rate if summary.completed else None


def statistic_names(summary: Summary) -> list[str]:
    """As `vllm bench serve` names them: mean, p50, p99.9."""
    return ["mean", *(f"p{percentile:g}" for percentile in summary.percentiles)]


def statistics_of(distribution: Distribution | None) -> dict[str, float]:
    """By name."""
    if distribution is None:
        return {}
    percentiles = {f"p{percentile:g}": value for percentile, value in distribution.percentiles.items()}
    return {"mean": distribution.mean, **percentiles}


def ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None
